"""How requests end: stops, limits, cancellation, refusals; and what the result counts."""

from __future__ import annotations

import pytest

from speccompile.errors import ConfigError, RequestError
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain, named_tree
from tests.runtime import fakes
from tests.runtime.fakes import finish, limits, make_session, plain

MC = named_tree("mc_sim_7b_63")
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(max_tokens=24, seed=0)
EXPECTED = plain(PROMPT, GREEDY, 24)


def run(p: SamplingParams, *, head=fakes.oracle, tree=MC, **options):
    session, _ = make_session(head, tree=tree, **options)
    request = session.submit(PROMPT, p)
    pieces = [request.output.take_text()]
    while not request.done:
        session.step()
        pieces.append(request.output.take_text())
    done = request.completion()
    assert "".join(pieces) == done.text
    return done, pieces


def first_at(index: int) -> int:
    """A token whose first appearance in the plain output is at or after ``index``."""
    return next(t for i, t in enumerate(EXPECTED) if i >= index and t not in EXPECTED[:i])


@pytest.mark.parametrize("tree", [OFF, chain(6), MC], ids=lambda t: t.name)
@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_stop_id_inside_a_block(tree, how) -> None:
    """V01: nothing follows the id that ends the text; the id is kept, its text is not."""
    stop = first_at(4)
    end = EXPECTED.index(stop)
    p = GREEDY if how == "eos" else SamplingParams(max_tokens=24, stop_token_ids=[stop])
    done, _ = run(p, tree=tree, eos_ids=[stop] if how == "eos" else [])
    assert done.token_ids == EXPECTED[: end + 1] and done.finish_reason == "stop"
    assert done.text == "".join(chr(97 + t) for t in EXPECTED[:end])
    assert done.completion_tokens == end + 1


def test_any_id_of_an_eos_list_ends_the_text() -> None:
    """V09."""
    stop = first_at(4)
    absent = [t for t in range(16) if t not in EXPECTED][:2]
    done, _ = run(GREEDY, eos_ids=[*absent, stop])
    assert done.token_ids[-1] == stop and done.finish_reason == "stop"


def test_ignore_eos_keeps_stop_ids() -> None:
    stop = first_at(4)
    done, _ = run(SamplingParams(max_tokens=24, ignore_eos=True), eos_ids=[stop])
    assert done.token_ids == EXPECTED
    done, _ = run(SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[stop]), eos_ids=[stop])
    assert done.token_ids[-1] == stop and done.finish_reason == "stop"


def test_stop_inside_a_block_that_crosses_the_limit() -> None:
    """V03: the stop comes before the cap, so it decides; exactly at the cap it still does."""
    stop = first_at(3)
    end = EXPECTED.index(stop)
    for cap in (end + 1, end + 2, end + 3):
        done, _ = run(SamplingParams(max_tokens=cap), tree=chain(6), eos_ids=[stop])
        assert done.token_ids == EXPECTED[: end + 1] and done.finish_reason == "stop"
    done, _ = run(SamplingParams(max_tokens=end), tree=chain(6), eos_ids=[stop])
    assert done.token_ids == EXPECTED[:end] and done.finish_reason == "length"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
def test_max_tokens_is_exact(count) -> None:
    """V05."""
    done, _ = run(SamplingParams(max_tokens=count))
    assert done.token_ids == EXPECTED[:count] and done.finish_reason == "length"
    if count <= 1:
        assert (done.rounds, done.acceptance_length, done.acceptance_by_depth) == (0, 0.0, [])


@pytest.mark.parametrize("tree", [OFF, chain(1), chain(6), MC], ids=lambda t: t.name)
@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_string_wherever_blocks_end(length, at, tree) -> None:
    """V07: text, ids and stream end before the first match, whatever block boundaries lie in it."""
    text = "".join(chr(97 + t) for t in EXPECTED)
    stop = text[at : at + length]
    start = text.index(stop)
    done, pieces = run(SamplingParams(max_tokens=24, stop=[stop, "zz"]), tree=tree)
    assert done.text == text[:start] and done.finish_reason == "stop"
    assert done.token_ids == EXPECTED[: start + length]
    assert all(text.startswith("".join(pieces[:i])) for i in range(len(pieces)))


def test_characters_split_over_tokens_and_blocks() -> None:
    """V19: every token is one byte of a four-byte character."""
    emoji = "🙂".encode()
    for tree in (OFF, chain(2), chain(5)):
        count = iter(range(1000))
        done, pieces = run(GREEDY, tree=tree, token_bytes=lambda _, c=count: emoji[next(c) % 4 :][:1])
        assert done.text == "🙂" * 6
        assert all(set(piece) <= {"🙂"} for piece in pieces)


def test_counters_count_kept_tokens_only() -> None:
    """The stop cuts the second block after two tokens: 5 + 2 of 10 drafted-and-bonus tokens are kept."""
    distinct = first_at(7)
    end = EXPECTED.index(distinct)
    done, _ = run(GREEDY, tree=chain(4), eos_ids=[distinct])
    full, cut = divmod(end, 5)  # the first token comes with the prompt
    kept = full * 5 + cut
    rounds = full + (cut > 0)
    assert done.rounds == rounds and done.acceptance_length == kept / rounds
    assert done.acceptance_by_depth == [
        (full + (cut >= depth)) / rounds for depth in range(1, 5) if full or cut >= depth
    ]
    assert done.ttft_s > 0 and done.tpot_s > 0 and done.tokens_per_s > 0


@pytest.mark.parametrize(
    ("prompt", "changes", "hint"),
    [
        ([], {}, "prompt is empty"),
        ([16], {}, "not a token id"),
        ([-1], {}, "not a token id"),
        ([1.0], {}, "not a token id"),
        ([True], {}, "not a token id"),
        ([1] * 96, {}, "max_seq_len 96"),
        ([1] * 97, {"max_tokens": 0}, "max_seq_len 96"),
        ([1], {"speculation": "chain-7"}, "max_tree_depth"),
        ([1], {"speculation": [[0], [4]]}, "draft_topk"),
        ([1], {"speculation": [[r] for r in range(4)] + [[r, s] for r in range(4) for s in range(4)] + [
            [r, s, t] for r in range(2) for s in range(2) for t in range(4)]}, "max_rows"),
    ],
)  # fmt: skip
def test_refused_requests_say_why(prompt, changes, hint) -> None:
    session, _ = make_session(tree=MC)
    with pytest.raises(RequestError, match=hint):
        session.submit(prompt, SamplingParams(**changes))
    assert session.idle


def test_trees_need_a_head_and_room() -> None:
    session, _ = make_session(None)
    with pytest.raises(RequestError, match="has none"):
        session.submit([1], SamplingParams(speculation="chain-2"))
    with pytest.raises(ConfigError, match="has none"):
        make_session(None, tree=chain(2))
    with pytest.raises(ConfigError, match="max_rows"):
        make_session(tree=MC, max_rows=6 * 26 - 1)


def test_small_pool_serves_all_in_order_of_arrival() -> None:
    """Blocks for about two requests: the rest wait their turn, none is overtaken, none runs out."""
    session, fake = make_session(fakes.noisy, tree=MC, num_blocks=26)
    prompts = [[t % 16] * (1 + 7 * (t % 3)) for t in range(9)]
    requests = [session.submit(prompt, GREEDY) for prompt in prompts]
    began: list[int] = []
    while not session.idle:
        session.step()
        began += [i for i, r in enumerate(requests) if r.committed and i not in began]
    assert began == list(range(9))
    fake.check_guard()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.completion().token_ids == plain(prompt, GREEDY, 24)
    with pytest.raises(RequestError, match="pool"):
        make_session(tree=MC, num_blocks=10)[0].submit([1], GREEDY)
    assert limits().default_num_blocks == 1 + 6 * 24


def test_cancel_waiting_reading_and_decoding_requests() -> None:
    session, _ = make_session(fakes.noisy, tree=MC, max_batch_size=2, prefill_chunk=2)
    decoding = session.submit([1], GREEDY)
    reading = session.submit([2] * 20, GREEDY)
    waiting = session.submit([3], GREEDY)
    last = session.submit([4], GREEDY)
    session.step()
    session.step()
    for request in (waiting, decoding, reading, decoding):
        session.cancel(request)
        assert request.done
    finish(session)
    assert last.completion().token_ids == plain([4], GREEDY, 24)
    ended = decoding.completion()
    assert ended.finish_reason == "cancelled"
    assert ended.token_ids == plain([1], GREEDY, 24)[: len(ended.token_ids)] and ended.token_ids
    assert waiting.completion().token_ids == reading.completion().token_ids == []


def test_session_statistics_add_up() -> None:
    session, _ = make_session(fakes.noisy, tree=chain(3))
    requests = [session.submit([t], GREEDY) for t in range(4)]
    finish(session)
    done = [request.completion() for request in requests]
    assert session.stats.counts.rounds == sum(d.rounds for d in done)
    assert session.stats.counts.tokens == sum(d.completion_tokens - 1 for d in done)
    assert 0 < session.stats.program_s < session.stats.step_s and 0 < session.stats.host_share < 1
