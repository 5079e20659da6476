"""Training rows: odd ones are counted by line (probe R09); answers are told apart by the template."""

import json

import pytest
import torch

from speccompile.checkpoint.target import open_target
from speccompile.errors import ConfigError
from speccompile.model.load import load_llama
from speccompile.train.cache import CacheError, RolloutCache
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.rows import read_rows
from speccompile.train.sources import RolloutJob, make_prompt, write_rollouts
from speccompile.train.talk import RolloutConfig
from speccompile.train.tokenizing import target_tokenizer
from tests.checkpoint.builders import write_llama, write_tokenizer

GOOD = [
    {"prompt": "hello there"},
    {"prompt": "hello", "response": "10 of them"},
    {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]},
    {"conversations": [{"from": "human", "value": "the dog"}, {"from": "gpt", "value": "lazy"}]},
    {"text": "<s><|user|>where<|end|><|assistant|>the wild thyme blows<|end|>"},
    {"messages": [{"role": "system", "content": "be quick"}, {"role": "user", "content": "go"}]},
    {"turns": ["hello", "and 10", "of them"]},
]
ODD = {
    "does not start with a user turn": {"messages": [{"role": "assistant", "content": "x"}]},
    "user and assistant turns do not alternate": {
        "messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    },
    "messages is empty or no list": {"messages": []},
    "a system turn only": {"messages": [{"role": "system", "content": "x"}]},
    "role 'tool' is not user, assistant or system": {"messages": [{"role": "tool", "content": "x"}]},
    "a turn without text": {"prompt": "  "},
    "none of prompt, messages, conversations, turns, text": {"id": 3},
}


@pytest.fixture
def target(tmp_path):
    write_llama(tmp_path / "target", bos_token_id=0, eos_token_id=1, num_hidden_layers=2)
    write_tokenizer(tmp_path / "target")
    return open_target(tmp_path / "target")


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    return path


def test_odd_rows_are_reported_by_line_and_the_rest_is_used(tmp_path):
    rows = [*GOOD, "", "{broken", *ODD.values()]
    good, report = read_rows(write(tmp_path / "d.jsonl", rows))
    assert [row.line for row in good] == list(range(1, len(GOOD) + 1))
    first = len(GOOD) + 2
    expected = {"not JSON": [first], **{reason: [first + 1 + i] for i, reason in enumerate(ODD)}}
    assert report.skipped == expected
    assert f"skipped 1 rows (lines {first}): not JSON" in report.lines()


def test_a_file_without_usable_rows_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no usable rows.*not JSON"):
        read_rows(write(tmp_path / "d.jsonl", ["{"]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")


def test_only_answers_with_their_end_are_supervised(target):
    tokenizer = target_tokenizer(target)
    frame = ChatFrame.of(tokenizer)
    chat = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "there"},
    ]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    mask = frame.answer_mask(ids)
    assert tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m], skip_special=False) == (
        "jumps<|end|>there<|end|>"
    )
    assert tokenizer.decode(frame.open, skip_special=False) == "<s><|user|>"
    assert tokenizer.decode(frame.ask, skip_special=False) == "<|assistant|>"
    assert tokenizer.decode(frame.next_user, skip_special=False) == "<|user|>"


def test_every_row_form_becomes_a_prompt(target, tmp_path):
    tokenizer = target_tokenizer(target)
    rows, _ = read_rows(write(tmp_path / "d.jsonl", GOOD))
    frame = ChatFrame.of(tokenizer)
    prompts = [make_prompt(row, tokenizer, frame) for row in rows]
    texts = [tokenizer.decode(p.ids, skip_special=False) for p in prompts]
    assert [tokenizer.decode(t) for t in prompts[-1].follow_ups] == ["and 10", "of them"]
    assert texts == [
        "<s><|user|>hello there<|end|><|assistant|>",
        "<s><|user|>hello<|end|><|assistant|>",
        "<s><|user|>the fox<|end|><|assistant|>",
        "<s><|user|>the dog<|end|><|assistant|>",
        "<s><|user|>where<|end|><|assistant|>",
        "<s><|system|>be quick<|end|><|user|>go<|end|><|assistant|>",
        "<s><|user|>hello<|end|><|assistant|>",
    ]


def roll(target, data, output, **changes):
    graph = load_llama(target.config, target.tensor, torch.float32)
    config = RolloutConfig(batch_size=8, max_answer=10, max_user=10, max_length=40, compile="off")
    settings = {
        "answers": "target", "answer_tokens": 60, "prefix": "s0",
        "say": lambda _line: None, "tick": lambda _count: None,
    } | changes  # fmt: skip
    job = RolloutJob(data=data, output=output, **settings)
    return write_rollouts(graph, target_tokenizer(target), config, job)


def test_rollouts_fill_a_cache(target, tmp_path):
    summary = roll(target, write(tmp_path / "d.jsonl", GOOD), tmp_path / "cache")
    assert summary.answer_tokens >= 60
    cache = RolloutCache(tmp_path / "cache", 0)
    assert sum(int(cache.tokens(r)[1].sum()) for r in cache.refs) == summary.answer_tokens
    assert cache.hidden_size == target.config.hidden_size


def test_given_answers_are_read_as_they_are(target, tmp_path):
    data = write(tmp_path / "d.jsonl", GOOD)
    roll(target, data, tmp_path / "cache", answers="given", answer_tokens=10**6)
    cache = RolloutCache(tmp_path / "cache", 0)
    tokenizer = target_tokenizer(target)
    answers = []
    for ref in cache.refs:
        ids, mask = cache.tokens(ref)
        answers.append(tokenizer.decode(ids[mask].tolist(), skip_special=False))
    assert answers == ["10 of them<|end|>", "jumps<|end|>", "lazy<|end|>", "the wild thyme blows<|end|>"]


def test_texts_in_another_chat_format_stop_the_run(target, tmp_path):
    """Probe R01."""
    data = write(tmp_path / "d.jsonl", [{"text": "USER: hello ASSISTANT: there"}] * 3)
    with pytest.raises(CacheError, match="0 supervised tokens in 100% of 3 rows"):
        roll(target, data, tmp_path / "cache", answers="given")
