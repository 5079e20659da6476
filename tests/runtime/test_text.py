"""Stop strings, detokenizer and block pool on their own, against plain rules."""

from __future__ import annotations

import itertools
import random

import pytest

from speccompile.errors import ConfigError
from speccompile.runtime.detokenize import Detokenizer
from speccompile.runtime.kv_blocks import NULL_BLOCK, BlockPool
from speccompile.runtime.output import Output
from speccompile.runtime.stops import StopStrings


def cut(text: str, stops: list[str]) -> str | None:
    """Text before the stop string that is complete first; None if there is none."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return None


def could_begin(shown: str, text: str, stops: list[str]) -> bool:
    """Whether something after ``shown`` was held back although no stop can begin there."""
    rest = text[len(shown) :]
    return not rest or any(stop.startswith(rest) for stop in stops)


@pytest.mark.parametrize("case", range(300))
def test_stop_strings_equal_the_plain_rule_for_any_pieces(case) -> None:
    rng = random.Random(case)
    text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 14)))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
    watcher, shown, position = StopStrings(stops), "", 0
    while position < len(text):
        size = rng.randint(0, 4)
        piece, stopped = watcher.push(text[position : position + size])
        position += size
        shown += piece
        if stopped:
            assert shown == cut(text, stops)
            return
        assert could_begin(shown, text[:position], stops)
    assert cut(text, stops) is None
    assert shown + watcher.flush() == text


def test_longer_stop_wins_when_two_end_together() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", True)
    assert StopStrings(["abc", "b"]).push("xabc") == ("xa", True)


def test_stop_inside_one_token_and_ids_end_with_it() -> None:
    words = {0: b"he", 1: b"llo wor", 2: b"ld"}
    output = Output(stop_ids=[], stops=["o w"], max_tokens=9, token_bytes=words.__getitem__)
    for token in (0, 1):
        output.push(token)
    assert (output.text, output.token_ids, output.finish_reason) == ("hell", [0, 1], "stop")


def test_held_text_is_shown_when_no_stop_follows() -> None:
    words = {0: b"a", 1: b"b"}
    for ending in ("length", "cancelled", "stop"):
        output = Output(stop_ids=[1], stops=["ab!"], max_tokens=2, token_bytes=words.__getitem__)
        output.push(0)
        assert output.take_text() == ""
        if ending == "cancelled":
            output.finish("cancelled")
        else:
            output.push(1 if ending == "stop" else 0)
        assert output.finish_reason == ending
        assert output.take_text() == output.text == ("aa" if ending == "length" else "a")


def test_detokenizer_holds_incomplete_characters_and_drops_an_unfinished_end() -> None:
    text = "aé🙂漢"
    for cuts in itertools.combinations(range(1, len(text.encode())), 4):
        parts = [text.encode()[i:j] for i, j in itertools.pairwise((0, *cuts, len(text.encode())))]
        detokenizer = Detokenizer(parts.__getitem__)
        pieces = [detokenizer.push(i) for i in range(len(parts))]
        assert "".join(pieces) == text
        assert "�" not in "".join(pieces)
    assert Detokenizer([b"a\xf0\x9f"].__getitem__).push(0) == "a"
    assert Detokenizer([b"a\xffb"].__getitem__).push(0) == "a�b"


def test_block_pool_accounts_for_every_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    assert (pool.capacity, pool.num_free, pool.blocks_for(0), pool.blocks_for(9)) == (5, 5, 0, 3)
    first, second = pool.take(2), pool.take(3)
    assert NULL_BLOCK not in {*first, *second} and len({*first, *second}) == 5
    with pytest.raises(AssertionError):
        pool.take(1)
    with pytest.raises(AssertionError):
        pool.check_idle()
    pool.give_back(first)
    with pytest.raises(AssertionError):
        pool.give_back(first)
    pool.give_back(second)
    pool.check_idle()
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(num_blocks=1, block_size=4)
