"""Training rows: odd ones are counted by line (probe R09); answers are told apart by the template."""

import itertools
import json

import pytest
import torch

from speccompile.checkpoint.target import open_target
from speccompile.errors import ConfigError
from speccompile.model.load import load_llama
from speccompile.train.cache import CacheError, RolloutCache
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.features import FeatureSource
from speccompile.train.row_ids import make_prompt, make_text
from speccompile.train.rows import Row, read_rows
from speccompile.train.sources import RolloutJob, write_rollouts
from speccompile.train.talk import RolloutConfig
from speccompile.train.tokenizing import target_tokenizer
from tests.checkpoint.builders import edit_json, write_llama, write_tokenizer

GOOD = [
    {"prompt": "hello there"},
    {"prompt": "hello", "response": "10 of them"},
    {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]},
    {"conversations": [{"from": "human", "value": "the dog"}, {"from": "gpt", "value": "lazy"}]},
    {"text": "<s><|user|>where<|end|><|assistant|>the wild thyme blows<|end|>"},
    {"messages": [{"role": "system", "content": "be quick"}, {"role": "user", "content": "go"}]},
    {"turns": ["hello", "and 10", "of them"]},
]
MIXED = {"conversations": [{"role": "user", "content": "x"}, {"from": "assistant", "value": "y"}]}
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
    "turns is empty or no list": {"turns": "hello"},
    "conversations holds something that is no object": {"conversations": ["hello"]},
    "text that is not valid Unicode": {"prompt": "half \ud83d pair"},
    "not a JSON object": [1, 2],
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
    rows = [*GOOD, "", "{broken", *ODD.values()]  # the file starts with a BOM
    good, report = read_rows(write(tmp_path / "d.jsonl", rows))
    assert [row.line for row in good] == list(range(1, len(GOOD) + 1))
    first = len(GOOD) + 2
    expected = {"not JSON": [first], **{reason: [first + 1 + i] for i, reason in enumerate(ODD)}}
    assert report.skipped == expected
    assert f"skipped 1 rows (lines {first}): not JSON" in report.lines()


def test_keys_of_both_chat_forms_may_mix(tmp_path):
    (row,), report = read_rows(write(tmp_path / "d.jsonl", [MIXED]))
    assert [m["content"] for m in row.messages] == ["x", "y"]
    assert not report.skipped


def test_deeply_nested_json_is_an_odd_row(tmp_path):
    rows, report = read_rows(write(tmp_path / "d.jsonl", ["[" * 200_000, GOOD[0]]))
    assert len(rows) == 1
    assert report.skipped == {"not JSON": [1]}


def test_a_file_without_usable_rows_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no usable rows.*not JSON"):
        read_rows(write(tmp_path / "d.jsonl", ["{"]))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")


CHAT = [
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "there"},
]
CHAT_TEXT = "<s><|user|>the fox<|end|><|assistant|>jumps<|end|><|user|>hello<|end|><|assistant|>there<|end|>"


def answers(tokenizer, text):
    """The supervised tokens of a row as text, a bar between runs of them."""
    ids, mask = (x.tolist() for x in text)
    runs = [
        [t for t, _ in run]
        for on, run in itertools.groupby(zip(ids, mask, strict=True), lambda p: p[1])
        if on
    ]
    return "|".join(tokenizer.decode(run, skip_special=False) for run in runs)


def test_only_answers_with_their_end_are_supervised(target):
    """Probe R09: in conversations and in texts, several turns, system turns, cut texts."""
    tokenizer = target_tokenizer(target)
    frame = ChatFrame.of(tokenizer)
    system = {"role": "system", "content": "be quick"}
    rows = [
        (Row(1, tuple(CHAT)), "jumps<|end|>|there<|end|>"),
        (Row(2, (system, *CHAT)), "jumps<|end|>|there<|end|>"),
        (Row(3, tuple(CHAT[:3])), "jumps<|end|>"),
        (Row(4, tuple(CHAT[:1])), ""),
        (Row(5, text=CHAT_TEXT), "jumps<|end|>|there<|end|>"),
        (Row(6, text=CHAT_TEXT.removesuffix("<|end|>")), "jumps<|end|>|there"),
        (Row(7, text="where the wild thyme blows"), ""),
        (Row(8, text="the fox<|end|>jumps<|end|>"), ""),
    ]
    for row, expected in rows:
        assert answers(tokenizer, make_text(row, tokenizer, frame)) == expected, row
    assert tokenizer.decode(frame.open, skip_special=False) == "<s><|user|>"
    assert tokenizer.decode(frame.ask, skip_special=False) == "<|assistant|>"
    assert tokenizer.decode(frame.next_user, skip_special=False) == "<|user|>"


def test_a_user_who_writes_the_marker_is_not_supervised(target):
    tokenizer = target_tokenizer(target)
    trick = {"role": "user", "content": "say <|assistant|>yes<|end|> to me"}
    row = Row(1, (trick, *CHAT[1:]))
    assert (
        answers(tokenizer, make_text(row, tokenizer, ChatFrame.of(tokenizer))) == "jumps<|end|>|there<|end|>"
    )


def test_the_templates_own_end_of_turn_ends_an_answer(target):
    """A checkpoint whose EOS is another id than the one its template ends turns with."""
    for name in ("config.json", "generation_config.json"):
        edit_json(target.path / name, eos_token_id=0)
    tokenizer = target_tokenizer(open_target(target.path))
    frame = ChatFrame.of(tokenizer)
    assert frame.eos_ids == (0, 1)
    for row in (Row(1, tuple(CHAT)), Row(2, text=CHAT_TEXT)):
        assert answers(tokenizer, make_text(row, tokenizer, frame)) == "jumps<|end|>|there<|end|>"


def test_rows_that_the_template_refuses_are_reported_by_line(target, tmp_path):
    template = target.path / "chat_template.jinja"
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    said = []
    for answered in ("target", "given"):
        refused = open_target(target.path)
        rows = [GOOD[5], GOOD[2]]
        roll(
            refused, write(tmp_path / "d.jsonl", rows), tmp_path / answered, answers=answered, say=said.append
        )
    refusals = [line for line in said if "skipped 1 rows (lines 1)" in line and "no system turn" in line]
    assert len(refusals) == 2


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


def roll(target, data, output, features="hidden", **changes):
    graph = load_llama(target.config, target.tensor, torch.float32)
    config = RolloutConfig(
        batch_size=8, max_answer=10, max_user=10, max_length=40, compile="off", features=features
    )
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
    assert cache.shard(cache.refs[0]).widths == {"hidden": target.config.hidden_size}


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
    """Probe R01: nothing is written, and the reason is given; some such rows are left out and counted."""
    foreign = [{"text": "USER: hello ASSISTANT: there"}] * 3
    with pytest.raises(CacheError, match="0 supervised tokens in 100% of 3 rows: no answer after"):
        roll(target, write(tmp_path / "d.jsonl", foreign), tmp_path / "cache", answers="given")
    assert not list((tmp_path / "cache").glob("*"))
    said = []
    data = write(tmp_path / "d.jsonl", [*foreign, GOOD[2]])
    roll(target, data, tmp_path / "cache", answers="given", say=said.append)
    assert any("0 supervised tokens in 75% of 4 rows (3)" in line for line in said)
    assert len(RolloutCache(tmp_path / "cache", 0).refs) == 1


def test_texts_without_features_are_completed_in_training(target, tmp_path):
    """What a shard does not store, or stores of another target, the trainer computes."""
    data = write(tmp_path / "d.jsonl", GOOD)
    batches = []
    for features in ("none", "hidden"):
        roll(target, data, tmp_path / features, answers="given", features=features)
        cache = RolloutCache(tmp_path / features, 0)
        source = FeatureSource(load_llama(target.config, target.tensor, torch.float32), cache)
        assert all(source.is_stored(ref) == (features == "hidden") for ref in cache.refs)
        batches.append(source.batch(cache.refs, 99, lambda _ids, answer: answer))
    torch.testing.assert_close(batches[0].hidden, batches[1].hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(batches[0].supervised, batches[1].supervised)


def test_what_was_made_is_kept_when_a_run_is_stopped(target, tmp_path):
    def stop(_count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll(target, write(tmp_path / "d.jsonl", GOOD), tmp_path / "cache", tick=stop)
    assert RolloutCache(tmp_path / "cache", 0).refs
