"""The dispatcher: no choice of trees changes a text, and drafts come back when the load falls."""

from __future__ import annotations

import random

import pytest

from speccompile.errors import ConfigError
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain
from speccompile.tree.table import TreeTable
from tests.runtime import fakes
from tests.runtime.fakes import finish, make_session, plain
from tests.runtime.graph import EAGLE1, EAGLE3, VOCAB, tiny
from tests.tree.test_tree import random_tree

BUSY_OFF = TreeTable((1, 2), (96,), ((chain(3),), (OFF,)))


class Shuffled(TreeTable):
    """Picks any of its trees, each time anew; ``off`` half of the time."""

    def pick(self, active: int, context: float):  # noqa: ARG002
        return OFF if DICE.random() < 0.5 else DICE.choice(self.trees)


DICE = random.Random(0)


def shuffled(seed: int, depth: int = 6) -> TreeTable:
    DICE.seed(seed)
    trees = [random_tree(seed + i, DICE.randint(1, 20), depth=depth) for i in range(3)]
    return Shuffled((1, 2, 3, 4), (96,), tuple((tree,) for tree in (OFF, *trees)))


@pytest.mark.parametrize("case", range(16))
def test_ids_equal_plain_while_trees_change_and_requests_come_and_go(case) -> None:
    session, fake = make_session(
        [fakes.noisy, fakes.oracle][case % 2],
        tree=shuffled(case),
        prefill_chunk=DICE.choice([None, 3, 16]),
        block_size=DICE.choice([1, 4, 16]),
        max_rows=DICE.choice([126, 160]),
    )
    requests = []
    for _ in range(9):
        p = SamplingParams(
            temperature=DICE.choice([0.0, 1.0]),
            seed=DICE.randrange(9),
            max_tokens=DICE.randint(1, 40),
            speculation=DICE.choice(["auto", "auto", "auto", "off", "chain-2"]),
        )
        prompt = [DICE.randrange(fakes.VOCAB) for _ in range(DICE.randint(1, 45))]
        requests.append((session.submit(prompt, p), prompt, p))
        for _ in range(DICE.randint(0, 6)):
            session.step()
    finish(session)
    fake.check_guard()
    for request, prompt, p in requests:
        assert request.completion().token_ids == plain(prompt, p, p.max_tokens)


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_equal_a_dense_forward_while_trees_change(head, temperature) -> None:
    graph = tiny(head, shuffled(3, depth=5), prefill_chunk=6)
    prompts = [[1], [3, 1, 4, 1, 5, 9, 2, 6], [t % VOCAB for t in range(17)]]
    each = [SamplingParams(max_tokens=m, temperature=temperature, seed=m) for m in (30, 12, 22)]
    requests = [graph.session.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    finish(graph.session)
    for request, prompt, p in zip(requests, prompts, each, strict=True):
        assert request.completion().token_ids == graph.plain(prompt, p)


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
def test_after_a_stretch_of_off_the_head_is_where_a_fresh_pass_would_put_it(head) -> None:
    graph = tiny(head, BUSY_OFF, prefill_chunk=6)
    request = graph.session.submit([t % VOCAB for t in range(17)], SamplingParams(max_tokens=40))
    other = graph.session.submit([3, 1], SamplingParams(max_tokens=12, speculation="off"))
    while not other.done:
        graph.session.step()
    assert not graph.roots, "the head was called although the table says off"
    for _ in range(3):
        text = list(request.tokens)
        graph.session.step()
        assert graph.roots[-1][0].tolist() == graph.fresh_roots(text)
    assert len(graph.roots) == 3


def test_drafts_stop_when_load_rises_and_come_back_when_it_falls() -> None:
    session, fake = make_session(fakes.oracle, tree=BUSY_OFF)
    first = session.submit([1, 2, 3], SamplingParams(max_tokens=60))
    for _ in range(3):
        session.step()
    second = session.submit([4, 5], SamplingParams(max_tokens=15))
    fake.calls.clear()
    while not second.done:
        session.step()
    assert {name for name, _ in fake.calls} == {"target_step", "accept"}
    fake.calls.clear()
    kept = len(first.output.token_ids)
    session.step()
    assert [name for name, _ in fake.calls] == [
        "draft_extend", "draft_step", "draft_step", "target_step", "accept",
    ]  # fmt: skip
    assert len(first.output.token_ids) == kept + 4, "the oracle knew everything at once"
    finish(session)
    assert first.completion().token_ids == plain([1, 2, 3], SamplingParams(seed=0), 60)


def test_a_long_absence_is_made_up_for_in_calls_of_max_rows() -> None:
    """The table says ``off`` up to 60 tokens; by then far more is pending than one call holds."""
    table = TreeTable((1,), (60, 200), ((OFF, chain(3)),))
    session, fake = make_session(fakes.oracle, tree=table, max_seq_len=200, max_rows=24, max_batch_size=2)
    requests = [session.submit([t] * 20, SamplingParams(max_tokens=100)) for t in (1, 2)]
    while not any(name == "draft_step" for name, _ in fake.calls):
        committed = sum(request.committed for request in requests)
        session.step()
    extends = [rows for name, rows in fake.calls if name == "draft_extend"]
    assert sum(extends) == committed > 5 * 24 and max(extends) == 24
    fake.calls.clear()
    finish(session)
    assert max(rows for name, rows in fake.calls if name == "draft_extend") == 2 * 4
    for t, request in zip((1, 2), requests, strict=True):
        done = request.completion()
        assert done.token_ids == plain([t] * 20, SamplingParams(seed=0), 100)
        assert done.acceptance_by_depth[2] > 0.2


def test_requests_may_refuse_the_table() -> None:
    for speculation, names in (("off", 2), ("chain-1", 3), ("auto", 4)):
        session, fake = make_session(fakes.oracle, tree=BUSY_OFF)
        session.submit([1], SamplingParams(max_tokens=20, speculation=speculation))
        finish(session)
        assert len({name for name, _ in fake.calls}) == names


def test_explicitly_plain_requests_keep_no_features() -> None:
    session, _ = make_session(fakes.oracle, tree=BUSY_OFF)
    plainly = session.submit([1], SamplingParams(max_tokens=20, speculation="off"))
    other = session.submit([1], SamplingParams(max_tokens=20))
    for _ in range(5):
        session.step()
    assert plainly.num_pending == 0 and other.num_pending == other.committed


def test_tables_are_checked_against_the_engine() -> None:
    with pytest.raises(ConfigError, match="max_tree_depth"):
        make_session(tree=TreeTable((1, 2), (8,), ((OFF,), (chain(9),))))
    with pytest.raises(ConfigError, match="has none"):
        make_session(None, tree=BUSY_OFF)
