"""Ranks measured by an engine's programs say exactly what its rounds accept."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import chain, named_tree
from speccompile.tree.replay import replay, walk_tree
from speccompile.tune.ranks import Ranker, Text
from tests.runtime import fakes
from tests.runtime.fakes import finish, make_session
from tests.runtime.graph import EAGLE1, EAGLE3, LIMITS, VOCAB, tiny
from tests.tree.test_tree import random_tree

TREES = [chain(1), chain(4), named_tree("default"), *(random_tree(s, 14, depth=5) for s in range(3))]


def check(session, programs, kv, prompts, tree, p) -> int:
    """Rounds of the session against the replay of ranks; returns the number of accepted drafts."""
    accepted = 0
    for prompt in prompts:
        request = session.submit(prompt, p)
        finish(session)
        done = request.completion()
        text = Text(
            tokens=[*prompt, *done.token_ids],
            first=len(prompt),
            temperature=p.temperature,
            seed=p.seed,
        )
        table = Ranker(programs, kv, depth=programs.limits.max_tree_depth).rank(text)
        rounds = replay(table, walk_tree(table, tree))
        assert len(table) == len(done.token_ids) - 1
        assert table.left.tolist() == list(range(len(table), 0, -1))
        assert len(rounds) == done.rounds
        # A round drafts nothing for the last token that max_tokens allows.
        drafted = np.minimum(rounds.accepted, table.left[rounds.row] - 1)
        reached = [(drafted >= d).mean() for d in range(1, tree.depth + 1)]
        assert [share for share in reached if share] == pytest.approx(done.acceptance_by_depth)
        accepted += int(drafted.sum())
    return accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES, ids=lambda t: f"{t.name}-{t.rows}")
def test_replay_equals_the_rounds_of_a_session(tree, temperature):
    session, fake = make_session(fakes.noisy, tree=tree, max_seq_len=96, max_rows=160)
    p = SamplingParams(max_tokens=60, temperature=temperature, seed=5)
    prompts = [[1], [3, 1, 4, 1, 5], [t % 16 for t in range(35)]]
    assert check(session, fake.program_set(), fake.cache, prompts, tree, p) > 20


def test_texts_longer_than_a_call_and_as_long_as_the_engine_allows():
    session, fake = make_session(fakes.noisy, tree=chain(3), max_batch_size=1, max_rows=24, max_seq_len=200)
    p = SamplingParams(max_tokens=500, seed=5)
    prompts = [[2] * 7, [2] * 120, [2] * 198]
    assert check(session, fake.program_set(), fake.cache, prompts, chain(3), p) > 20


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
def test_replay_equals_the_rounds_of_a_real_head(head):
    tree = random_tree(1, 20, depth=LIMITS.max_tree_depth)
    graph = tiny(head, tree)
    p = SamplingParams(max_tokens=50, temperature=1.0, seed=2)
    prompts = [[1], [t % VOCAB for t in range(17)]]
    assert check(graph.session, graph.programs, graph.kv, prompts, tree, p) > 10


def test_an_answer_of_one_token_has_no_rounds():
    _, fake = make_session(fakes.noisy)
    assert len(Ranker(fake.program_set(), fake.cache, depth=3).rank(Text(tokens=[1, 2], first=1))) == 0
