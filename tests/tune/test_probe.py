"""Measured rounds: every program has its curve, sizes stay within the engine, sessions are not touched."""

from __future__ import annotations

import pytest
import torch

from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain
from speccompile.tune.probe import Probe, Sample, load_costs, probe_tree, probe_trees
from tests.runtime.fakes import finish, limits
from tests.runtime.graph import EAGLE1, EAGLE3, tiny


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 11, 15, 31])
def test_probe_trees_have_their_size_and_two_levels(nodes):
    tree = probe_tree(nodes, width=8, depth=5)
    assert tree.num_nodes == nodes and tree.max_rank < 8
    assert tree.depth == (1 if nodes == 1 else 2)
    assert probe_tree(min(nodes, 8), width=8, depth=1).depth == 1


@pytest.mark.parametrize(
    "sizes", [{"draft_topk": 2}, {"max_tree_depth": 1}, {"max_rows": 12, "max_batch_size": 6}, {}]
)
def test_probes_stay_within_the_limits(sizes):
    have = limits(**sizes)
    for batch in (1, have.max_batch_size):
        trees = probe_trees(have, batch)
        assert trees[0] == OFF and len(trees) > 1
        for tree in trees:
            assert tree.rows * batch <= have.max_rows and tree.rows <= have.rows_per_request
            assert tree.depth <= have.max_tree_depth and tree.max_rank < have.draft_topk


def test_costs_are_what_undisturbed_rounds_take():
    def sample(tree, kept, host, **programs):
        return Sample(tree=tree, kept=kept, programs=programs, host=host)

    plain = {"target_step": 5.0, "accept": 1.0}
    drafted = {"target_step": 6.0, "accept": 1.5, "draft_extend": 0.5, "draft_step": 0.25}
    samples = [
        sample(OFF, 1, 0.1, **plain),
        sample(OFF, 1, 0.3, **{**plain, "target_step": 50.0}),
        sample(OFF, 1, 0.2, **plain),
        sample(chain(2), 2, 0.4, **drafted),
    ]
    costs = load_costs(4, 99, samples)
    assert (costs.batch, costs.context) == (4, 99)
    assert (costs.target_step.x, costs.target_step.seconds) == ((1, 3), (5.0, 6.0))
    assert (costs.draft_extend.x, costs.draft_extend.seconds) == ((2,), (0.5,))
    assert (costs.draft_step.x, costs.draft_step.seconds) == ((1,), (0.25,))
    assert costs.host.x == (2, 4) and costs.host.seconds == pytest.approx((0.15, 0.4))
    assert costs.round_seconds(chain(2), 2) == pytest.approx(6 + 1.5 + 0.5 + 0.25 + 0.4)


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (3, 20), (4, 70)])
def test_a_measured_load(head, batch, context):
    graph = tiny(head, chain(2))
    rows = []
    target_step = graph.programs.target_step

    def counting(token, *rest):
        rows.append(len(token))
        return target_step(token, *rest)

    programs = type(graph.programs)(**{**vars(graph.programs), "target_step": counting})
    with torch.no_grad():
        (costs,) = Probe(programs, graph.kv, temperature=1.0).measure(
            [(batch, context)], repeats=2, worth=1e9
        )
    assert costs.target_step.x[0] == 1 and batch * costs.target_step.x[-1] == max(rows)
    assert context + costs.target_step.x[-1] <= graph.limits.max_seq_len
    assert costs.draft_step.x[0] == 1
    for curve in (costs.target_step, costs.accept, costs.draft_extend, costs.draft_step, costs.host):
        assert all(seconds > 0 for seconds in curve.seconds)
    request = graph.session.submit([3, 1, 4], SamplingParams(max_tokens=12, seed=1, temperature=1.0))
    finish(graph.session)
    assert request.completion().token_ids == graph.plain([3, 1, 4], request.params)


def test_sizes_beyond_what_pays_are_not_measured():
    graph = tiny(EAGLE1, chain(2))
    (costs,) = Probe(graph.programs, graph.kv, temperature=0.0).measure([(1, 10)], repeats=1, worth=0.0)
    assert costs.target_step.x == (1,)
