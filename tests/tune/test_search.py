"""Costs of a round by hand, and the chosen tree against all trees of tiny cases."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.tree.named import OFF, chain, named_tree
from speccompile.tree.replay import RankTable, join_tables, replay, walk_tree
from speccompile.tree.tree import tree_from_paths
from speccompile.tune.costs import Curve, LoadCosts, curve_of, round_calls
from speccompile.tune.search import Candidate, candidate_trees, choose, score
from tests.tree.test_search import all_trees, random_table, table


def costs(batch=1, row=0.0, step=0.0, fed=0.0, call=10.0, context=100) -> LoadCosts:
    """Seconds ``call`` + ``row`` per row for the target; ``step`` + ``fed`` per node for a draft step."""
    return LoadCosts(
        batch=batch,
        context=context,
        target_step=Curve((1, 101), (call + row, call + 101 * row)),
        accept=Curve((1,), (0.0,)),
        draft_extend=Curve((1,), (step,)),
        draft_step=Curve((0, 100), (step, step + 100 * fed)),
        host=Curve((2,), (0.0,)),
    )


def test_curves_bend_between_points_and_go_on_beyond_the_last():
    curve = curve_of({4: [2.2, 9.0, 2.2, 2.1, 7.0], 1: [1.0], 2: [1.4]})
    assert (curve.x, curve.seconds) == ((1, 2, 4), (1.0, 1.4, 2.2))
    assert [curve.at(x) for x in (0, 1, 1.5, 4, 6)] == pytest.approx([1.0, 1.0, 1.2, 2.2, 3.0])
    assert Curve((1, 2), (3.0, 2.0)).at(9) == 2.0, "more work is never expected to take less time"
    assert Curve((5,), (3.0,)).at(9) == 3.0


def test_a_round_is_the_sum_of_its_calls():
    tree = tree_from_paths([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    load = LoadCosts(
        batch=1,
        context=1,
        target_step=Curve((1, 6), (10.0, 20.0)),
        accept=Curve((1, 6), (1.0, 2.0)),
        draft_extend=Curve((1, 2), (3.0, 5.0)),
        draft_step=Curve((1, 2), (0.1, 0.3)),
        host=Curve((2, 5), (0.01, 0.07)),
    )
    assert round_calls(tree) == 5 and round_calls(OFF) == 2
    # draft_step is fed 2 nodes (both children of the root), then 1
    assert load.round_seconds(tree, 1.5) == pytest.approx(20 + 2 + 4 + 0.3 + 0.1 + 0.07)
    assert load.round_seconds(OFF, 1.0) == pytest.approx(10 + 1 + 0.01)


def best_speed(t: RankTable, load: LoadCosts, trees) -> float:
    speeds = []
    for tree in trees:
        tokens = replay(t, walk_tree(t, tree)).acceptance_length
        speeds.append(tokens / load.round_seconds(tree, tokens))
    return max(speeds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load", [costs(row=0.5, step=0.3), costs(row=1.5, step=0.2, fed=0.2), costs(row=4)])
def test_the_choice_is_near_the_best_of_all_trees(seed, load):
    t = random_table(seed, 500, depth=3, width=2)
    trees = [OFF, *(tree for nodes in range(1, 7) for tree in all_trees(nodes, 3, 2))]
    assert len(trees) > 100
    found = candidate_trees(t, max_nodes=6, max_depth=3)
    choice = choose(score(t, found, [100]), load, 0, margin=1.0)
    assert choice.tokens_per_s >= 0.99 * best_speed(t, load, trees)
    assert choice.off_tokens_per_s == pytest.approx(1 / load.round_seconds(OFF, 1))


def test_rows_for_free_give_the_largest_tree_and_dear_rows_none():
    t = random_table(0, 600, depth=3, width=2)
    found = score(t, candidate_trees(t, max_nodes=10, max_depth=3), [100])
    assert choose(found, costs(), 0, margin=1.0).tree.num_nodes == 10
    dear = choose(found, costs(row=100.0), 0, margin=1.0)
    assert dear.tree == OFF and dear.gain == 1.0 and dear.tokens_per_round == 1.0


def test_small_gains_are_left_alone():
    found = [Candidate(chain(1), (1.2,))]
    load = costs(row=1.0)  # 11 s for one row, 12 for two: 10 % gain
    assert choose(found, load, 0, margin=1.05).tree == chain(1)
    assert choose(found, load, 0, margin=1.15).tree == OFF


def test_candidates_stay_within_the_limits_and_hold_chains():
    t = random_table(3, 900, depth=6, width=4)
    for max_nodes, max_depth in ((63, 8), (5, 2), (3, 6), (1, 1)):
        trees = candidate_trees(t, max_nodes=max_nodes, max_depth=max_depth)
        assert OFF in trees and len(set(trees)) == len(trees)
        for tree in trees:
            assert tree.num_nodes <= max_nodes and tree.depth <= min(max_depth, 6) and tree.max_rank < 4
        for depth in range(1, min(max_nodes, max_depth, 6) + 1):
            assert chain(depth) in trees
    assert next(x for x in trees if x == chain(1)).name == "chain-1"
    wide = candidate_trees(t, max_nodes=63, max_depth=8)
    assert named_tree("default") in wide and max(tree.num_nodes for tree in wide) == 63


def test_acceptance_is_taken_by_context_where_there_are_enough_rounds():
    """Short contexts accept everything, long ones nothing."""
    rows = 300
    easy = table(*[(0, 0)] * rows, position=10)
    hard = table(*[(1, 1)] * rows, position=1000)
    t = join_tables([easy, hard], 2)
    (short,) = score(t, [chain(1)], [400, 2000])
    assert short.tokens == (2.0, 1.0)
    (few,) = score(t, [chain(1)], [50, 2000])
    average = 2 * rows / (rows / 2 + rows)
    assert few.tokens[0] == pytest.approx(average), "40 positions are too few to go by"
    assert np.isfinite(few.tokens[1])
