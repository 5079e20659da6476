"""Sessions over the table model: ids equal plain decoding whatever the head, tree, batch or chunk."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from speccompile.runtime import round as round_module
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain, named_tree
from tests.runtime import fakes
from tests.runtime.fakes import finish, make_session, plain
from tests.tree.test_tree import random_tree

MC = named_tree("mc_sim_7b_63")
HEADS = [fakes.oracle, fakes.anti, fakes.second, fakes.noisy, fakes.always(3)]
FILTERS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.5},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 7, **changes})


def run_one(head, tree, prompt, p, **options):
    session, fake = make_session(head, tree=tree, **options)
    request = session.submit(prompt, p)
    finish(session)
    fake.check_guard()
    return request.completion(), fake


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [OFF, chain(1), chain(4), MC, named_tree("deep-15")], ids=lambda t: t.name)
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.__name__)
def test_ids_equal_plain_decoding(head, tree, temperature) -> None:
    p = params(temperature=temperature)
    done, _ = run_one(head, tree, [1, 2, 3], p)
    assert done.token_ids == plain([1, 2, 3], p, 24)
    assert done.finish_reason == "length"
    assert done.text == "".join(chr(97 + t) for t in done.token_ids)


@pytest.mark.parametrize("case", range(24))
def test_ids_equal_plain_in_any_company(case) -> None:
    """Random trees, prompts, lengths, filters, seeds, arrival times, chunk sizes and head."""
    rng = random.Random(case)
    session, fake = make_session(
        rng.choice(HEADS),
        tree=random_tree(case, rng.randint(1, 20), depth=6),
        prefill_chunk=rng.choice([None, 1, 3, 16]),
        block_size=rng.choice([1, 4, 16, 32]),
        max_rows=rng.choice([130, 160]),
    )
    requests = []
    for index in range(rng.randint(2, 9)):
        tree = rng.choice(
            ["auto", "off", "chain-3", random_tree(100 * case + index, rng.randint(1, 20), depth=6)]
        )
        p = params(
            **rng.choice(FILTERS), seed=rng.randrange(9), max_tokens=rng.randint(1, 20), speculation=tree
        )
        prompt = [rng.randrange(fakes.VOCAB) for _ in range(rng.randint(1, 45))]
        requests.append((session.submit(prompt, p), prompt, p))
        for _ in range(rng.randint(0, 3)):
            session.step()
    finish(session)
    fake.check_guard()
    for request, prompt, p in requests:
        assert request.completion().token_ids == plain(prompt, p, p.max_tokens)


def test_accepted_rows_that_are_scattered_are_compacted() -> None:
    """T01: the right candidate is always the second-best, so accepted rows never lie side by side."""
    done, _ = run_one(fakes.second, MC, [5], params(max_tokens=64))
    assert done.token_ids == plain([5], params(), 64)
    assert done.acceptance_by_depth == [1.0, pytest.approx(1.0, abs=0.05)]  # [1] and [1, 1] are in the tree


def test_a_round_is_one_call_per_depth_and_counts_match() -> None:
    done, fake = run_one(fakes.oracle, chain(3), [1, 2, 3], params(max_tokens=13))
    assert [name for name, _ in fake.calls] == ["target_step", "accept"] + 3 * [
        "draft_extend",
        "draft_step",
        "draft_step",
        "target_step",
        "accept",
    ]
    assert [rows for name, rows in fake.calls if name == "target_step"] == [3, 4, 4, 4]
    assert [rows for name, rows in fake.calls if name == "draft_extend"] == [3, 4, 4]
    assert (done.rounds, done.acceptance_length, done.acceptance_by_depth) == (3, 4.0, [1.0, 1.0, 1.0])


def test_off_is_plain_decoding_without_draft_calls() -> None:
    for head in (fakes.oracle, None):
        done, fake = run_one(head, OFF, [1, 2, 3], params())
        assert {name for name, _ in fake.calls} == {"target_step", "accept"}
        assert (done.rounds, done.acceptance_length, done.acceptance_by_depth) == (23, 1.0, [])


def test_anti_head_accepts_nothing_and_last_round_drafts_nothing() -> None:
    done, fake = run_one(fakes.anti, chain(3), [1], params(max_tokens=4))
    assert done.acceptance_length == 1.0 and done.rounds == 3
    assert [rows for name, rows in fake.calls if name == "target_step"] == [
        2,
        3,
        2,
        2,
    ]  # 1 row is padded to 2


def test_acceptance_does_not_fade_with_length() -> None:
    """K01: the head's KV is rebuilt from true features, so an oracle stays one to the last round."""
    done, _ = run_one(fakes.oracle, chain(4), [1, 2, 3], params(max_tokens=81))
    assert done.rounds == 16 and done.acceptance_length == 5.0


@pytest.mark.parametrize("tree", [chain(3), MC], ids=lambda t: t.name)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_do_not_change_ids_or_acceptance(chunk, tree) -> None:
    """K03: every chunk's features reach the head."""
    prompt = [t % 16 for t in range(23)]
    whole, _ = run_one(fakes.noisy, tree, prompt, params())
    split, fake = run_one(fakes.noisy, tree, prompt, params(), prefill_chunk=chunk)
    assert split.token_ids == whole.token_ids == plain(prompt, params(), 24)
    assert split.acceptance_by_depth == whole.acceptance_by_depth
    assert max(rows for name, rows in fake.calls[:3] if name == "target_step") == max(2, chunk)


def test_eight_equal_prompts_at_once() -> None:
    """K05: cold start of equal prompts, more of them than the batch holds."""
    session, _ = make_session(fakes.noisy, tree=MC, max_batch_size=5)
    requests = [session.submit([3, 1, 4, 1, 5], params()) for _ in range(8)]
    finish(session)
    assert all(r.completion().token_ids == plain([3, 1, 4, 1, 5], params(), 24) for r in requests)


def test_ragged_batch_equals_single_runs() -> None:
    """K07: prompts of 3, 17 and 40 tokens with different ends."""
    session, _ = make_session(fakes.noisy, tree=named_tree("deep-15"))
    prompts = [[t % 16 for t in range(n)] for n in (3, 17, 40)]
    requests = [session.submit(p, params(max_tokens=m)) for p, m in zip(prompts, (5, 30, 11), strict=True)]
    finish(session)
    for request, prompt in zip(requests, prompts, strict=True):
        alone, _ = run_one(fakes.noisy, named_tree("deep-15"), prompt, request.params)
        assert request.completion().token_ids == alone.token_ids
        assert request.completion().acceptance_by_depth == alone.acceptance_by_depth


def test_drafted_eos_is_not_an_end() -> None:
    """K09: the head drafts EOS everywhere; only the target's own EOS ends the text."""
    expected = plain([1, 2], params(), 24)
    eos = next(t for t in range(16) if t not in expected[:8] and t in expected[8:])
    done, _ = run_one(fakes.always(eos), MC, [1, 2], params(), eos_ids=[eos])
    assert done.token_ids == expected[: expected.index(eos) + 1]
    assert done.finish_reason == "stop"


def test_seed_decides_alone_and_in_company() -> None:
    """S07: seed 7 gives the same ids alone, again, and among others that end at other steps."""
    p = params(temperature=1.0)
    alone = [run_one(fakes.noisy, MC, [1, 2, 3], p)[0].token_ids for _ in range(2)]
    session, _ = make_session(fakes.noisy, tree=MC)
    others = [params(temperature=1.0, seed=s, max_tokens=4 + 5 * s) for s in range(4)]
    requests = [session.submit([1, 2, 3], each) for each in (*others[:2], p, *others[2:])]
    finish(session)
    assert requests[2].completion().token_ids == alone[0] == alone[1]
    assert requests[1].completion().token_ids != alone[0][:9]


def test_unseeded_requests_differ_and_report_their_seed() -> None:
    """S09, S13: 20 requests without a seed are not alike, and each can be drawn again."""
    session, _ = make_session(fakes.oracle, tree=chain(2))
    done = []
    for _ in range(20):
        request = session.submit([1], SamplingParams(max_tokens=8, temperature=1.0))
        finish(session)
        done.append(request.completion())
    assert len({tuple(d.token_ids) for d in done}) > 10 and len({d.seed for d in done}) == 20
    again = params(temperature=1.0, seed=done[0].seed, max_tokens=8)
    assert run_one(fakes.oracle, OFF, [1], again)[0].token_ids == done[0].token_ids


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("head", [fakes.oracle, fakes.noisy], ids=lambda h: h.__name__)
def test_filters_reach_every_row_of_a_block(head, filters) -> None:
    """S05, S11: filtered draws inside accepted blocks and on bonus rows equal plain ones."""
    p = params(**filters, max_tokens=40)
    assert run_one(head, MC, [1, 2], p)[0].token_ids == plain([1, 2], p, 40)


def test_top_k_1_at_high_temperature_is_greedy() -> None:
    hot = params(temperature=50.0, top_k=1)
    assert run_one(fakes.oracle, MC, [9], hot)[0].token_ids == plain([9], params(), 24)
    tiny = params(temperature=50.0, top_p=1e-6)
    assert run_one(fakes.oracle, MC, [9], tiny)[0].token_ids == plain([9], params(), 24)


@pytest.mark.parametrize("prompt", [[0], [7], [15, 15]])
def test_shortest_prompts(prompt) -> None:
    """V17: one token is enough for target and head."""
    assert run_one(fakes.noisy, MC, prompt, params())[0].token_ids == plain(prompt, params(), 24)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("length", [1, 40, 60, 61, 62, 63])
@pytest.mark.parametrize("head", [fakes.oracle, fakes.anti], ids=lambda h: h.__name__)
def test_no_slot_past_max_seq_len(head, length, block_size) -> None:
    """B03: max_seq_len 64 and a tree of 26 rows; 62 -> 2 new tokens, 63 -> 1; the fake checks each slot."""
    prompt = [t % 16 for t in range(length)]
    p = params(max_tokens=200)
    done, _ = run_one(head, MC, prompt, p, max_seq_len=64, block_size=block_size)
    assert done.token_ids == plain(prompt, p, 64 - length)
    assert done.finish_reason == "length"


def test_one_transfer_to_the_host_per_round() -> None:
    """Nothing in the round's modules waits for the device except the one copy of the result."""
    folder = Path(round_module.__file__).parent
    text = "".join(
        (folder / f"{name}.py").read_text() for name in ("batch", "members", "draft", "verify", "round")
    )
    assert len(re.findall(r"\.cpu\(", text)) == 1
    assert not re.findall(r"\.item\(|nonzero\(|synchronize\(", text)
