"""Prompt files: the three kinds of rows, conversations, and errors that name the line."""

import pytest

from speccompile.cli.prompts import read_prompts, single_prompt
from speccompile.errors import ConfigError


class EchoTokenizer:
    """Stands for a tokenizer: ids carry what was encoded."""

    def encode(self, text):
        return ["text", text]

    def encode_chat(self, messages):
        return [f"{m['role']}:{m['content']}" for m in messages]


def questions(prompt, **options):
    """What a conversation asks when answer number n is ``An``."""
    asked = []

    def answer(ids, name):
        asked.append((name, list(ids)))
        return f"A{len(asked)}"

    history = prompt.conversation(EchoTokenizer(), answer, **options)
    return asked, history


def write(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows(tmp_path):
    path = write(
        tmp_path,
        '\ufeff{"prompt": "hello"}\n\n'
        '{"id": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        '{"turns": ["one", "two"], "category": "x"}\n',
    )
    text, messages, turns = read_prompts(path)
    assert questions(text)[0] == [("1", ["text", "hello"])]
    assert questions(messages)[0] == [("m", ["system:s", "user:u"])]
    asked, history = questions(turns)
    assert asked == [("4/1", ["user:one"]), ("4/2", ["user:one", "assistant:A1", "user:two"])]
    assert [m["content"] for m in history] == ["one", "A1", "two", "A2"]
    assert questions(turns, only_first=True)[0] == [("4/1", ["user:one"])]


def test_chat_turns_text_into_a_user_message(tmp_path):
    (row,) = read_prompts(write(tmp_path, '{"prompt": "hello"}\n'), chat=True)
    assert questions(row)[0] == [("1", ["user:hello"])]


def test_dialogue_goes_on():
    _, history = questions(single_prompt("a", "1", chat=True))
    asked, _ = questions(single_prompt("b", "2", chat=True, history=history))
    assert asked == [("2", ["user:a", "assistant:A1", "user:b"])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[]", "p.jsonl:2: expected an object with exactly one of prompt, messages, turns"),
        ('{"id": 1}', "exactly one of"),
        ('{"prompt": "a", "turns": ["b"]}', "exactly one of"),
        ('{"prompt": 1}', "prompt must be text"),
        ('{"turns": []}', "turns must be a list that is not empty"),
        ('{"turns": [1]}', "turns must be a list of texts"),
        ('{"messages": "x"}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] needs role and content"),
        ('{"messages": ["x"]}', r"messages\[0\] needs role and content"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(tmp_path, '{"prompt": "fine"}\n' + line + "\n"))


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write(tmp_path, "\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent")


def test_a_row_may_hold_any_line_separator_of_unicode(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n', encoding="utf-8")
    assert [row.text for row in read_prompts(file)] == ["a\u2028b\u0085c", "d"]
