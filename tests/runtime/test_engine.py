"""Engine over the table model: prompts of every form, batches, streams.  Loading is tested with the CLI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.errors import RequestError
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import named_tree
from tests.runtime import fakes
from tests.runtime.fakes import VOCAB, plain

P = SamplingParams(max_tokens=12, seed=1)


class FakeTokenizer:
    """One letter per id; ``<`` opens a chat message; id 0 is BOS and special."""

    special_ids = frozenset([0])

    def __init__(self, adds_bos: bool, eos_ids: tuple[int, ...]) -> None:
        self._bos, self.eos_ids = [0] if adds_bos else [], eos_ids

    def encode(self, text: str) -> list[int]:
        return [*self._bos, *(ord(c) - 97 for c in text)]

    def encode_chat(self, messages) -> list[int]:
        return [0, *(ord(c) - 97 for m in messages for c in m["content"]), 1]

    def token_bytes(self, token: int) -> bytes:
        return fakes.token_bytes(token)


def make_engine(
    adds_bos: bool = True, *, config_eos=(), tokenizer_eos=(), tokenizer=None, **programs
) -> Engine:
    """``programs`` replace programs of the table model; end ids come from config and tokenizer."""
    fake = fakes.FakePrograms(fakes.limits(), fakes.noisy)
    return Engine(
        path=Path("engine"),
        manifest=SimpleNamespace(target=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=config_eos)),
        tokenizer=tokenizer or FakeTokenizer(adds_bos, tokenizer_eos),
        programs=replace(fake.program_set(), **programs),
        kv=fake.kv(),
        default_tree=named_tree("mc_sim_7b_63"),
    )


def test_prompts_of_every_form() -> None:
    engine = make_engine()
    chat = [{"role": "user", "content": "bc"}]
    assert engine.generate("bc", P).token_ids == plain([0, 1, 2], P, 12)
    assert engine.generate([1, 2], P).token_ids == plain([1, 2], P, 12)
    assert engine.generate("bc", P, chat=True).token_ids == plain([0, 1, 2, 1], P, 12)
    assert engine.generate(chat, P).token_ids == plain([0, 1, 2, 1], P, 12)
    batch = engine.generate(["bc", [1, 2], chat], P)
    assert [d.token_ids for d in batch] == [plain(p, P, 12) for p in ([0, 1, 2], [1, 2], [0, 1, 2, 1])]
    assert engine.generate([], P) == []


def test_empty_text_is_bos_or_refused() -> None:
    """V17."""
    assert make_engine().generate("", P).token_ids == plain([0], P, 12)
    with pytest.raises(RequestError, match="prompt is empty"):
        make_engine(adds_bos=False).generate("", P)


def test_parameters_per_prompt_and_a_refused_prompt_leaves_nothing_behind() -> None:
    engine = make_engine()
    each = [SamplingParams(max_tokens=n) for n in (2, 5)]
    assert [d.completion_tokens for d in engine.generate([[1], [2]], each)] == [2, 5]
    with pytest.raises(RequestError, match="params: 2 for 1"):
        engine.generate([[1]], each)
    with pytest.raises(RequestError, match="not a token id"):
        engine.generate([[1], [99]], P)
    assert engine.session.idle


def test_special_tokens_are_not_shown() -> None:
    engine = make_engine()
    done = engine.generate([3], SamplingParams(max_tokens=60))
    assert 0 in done.token_ids
    assert done.text == "".join(chr(97 + t) for t in done.token_ids if t)


def test_stream_gives_the_same_text_and_ends_when_left() -> None:
    engine = make_engine()
    whole = engine.generate("bc", P)
    stream = engine.stream("bc", P)
    pieces = list(stream)
    assert "".join(pieces) == whole.text and len(pieces) > 1
    assert stream.completion.token_ids == whole.token_ids
    assert engine.stream("bc", P).completion.token_ids == whole.token_ids
    left = engine.stream("bc", P)
    next(iter(left))
    left.close()
    assert left.completion.finish_reason == "cancelled" and engine.session.idle


def test_two_streams_at_once() -> None:
    engine = make_engine()
    first, second = engine.stream([1], P), engine.stream([2], P)
    pairs = zip(first, second, strict=False)
    next(pairs)
    assert second.completion.token_ids == plain([2], P, 12)
    assert first.completion.token_ids == plain([1], P, 12)


def test_a_stream_shows_all_its_text_when_others_step_the_session() -> None:
    engine = make_engine()
    whole = engine.generate("bc", P).text
    stream = engine.stream("bc", P)
    shown = ""
    for piece in stream:
        shown += piece
        engine.generate("cb", P)
    assert shown == whole == stream.completion.text


def test_dropped_streams_are_cancelled() -> None:
    engine = make_engine()
    for _ in range(5):
        engine.stream("bc", P)
    assert engine.session.idle


def test_token_ids_may_come_from_numpy_and_must_be_whole() -> None:
    engine = make_engine()
    expected = engine.generate([2, 3], P).token_ids
    assert engine.generate(np.array([2, 3]), P).token_ids == expected
    assert engine.complete(np.array([2, 3]), P).token_ids == expected
    with pytest.raises(RequestError, match="whole numbers"):
        engine.complete([2.5], P)


def test_complete_refuses_an_empty_prompt() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        make_engine().complete([], P)


def test_a_failing_program_leaves_no_request_behind() -> None:
    """Not even when others go on afterwards: the round that failed is run again for them."""
    fails = iter([False, False, False, True])

    def target_step(*inputs):
        if next(fails, False):
            raise MemoryError
        return engine_fake.target_step(*inputs)

    engine_fake = fakes.FakePrograms(fakes.limits(), fakes.noisy)
    engine = make_engine(target_step=target_step)
    other = engine.stream([2], P)
    next(iter(other))
    with pytest.raises(MemoryError):
        engine.generate([1], P)
    assert other.completion.token_ids == plain([2], P, 12)
    assert engine.session.idle
    assert engine.generate([1], P).token_ids == plain([1], P, 12)
