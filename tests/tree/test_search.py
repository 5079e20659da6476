"""Replays of rank tables by hand, and the best tree against all trees."""

from itertools import combinations, product

import numpy as np
import pytest

from speccompile.errors import ConfigError
from speccompile.tree.named import OFF, chain, named_tree
from speccompile.tree.replay import NOT_DRAFTED, RankTable, join_tables, replay, walk_full_tree, walk_tree
from speccompile.tree.search import best_tree, most_frequent_paths
from speccompile.tree.tree import tree_from_paths

X = NOT_DRAFTED


def table(*rows: tuple[int, ...], position: int = 10) -> RankTable:
    """One text; later ranks are cut to what is left of it."""
    count = len(rows)
    rank = np.array(rows, np.uint8)
    for n in range(count):
        rank[n, count - n :] = X
    left = np.arange(count, 0, -1, dtype=np.int32)
    return RankTable(rank, left, np.arange(position, position + count, dtype=np.int32))


def random_table(seed: int, rows: int, depth: int, width: int = 3) -> RankTable:
    rng = np.random.default_rng(seed)
    drawn = rng.choice(
        [*range(width), X], size=(rows, depth), p=[0.5, *[0.4 / (width - 1)] * (width - 1), 0.1]
    )
    return join_tables([table(*drawn[: rows // 3].tolist()), table(*drawn[rows // 3 :].tolist())], depth)


def all_trees(nodes: int, depth: int, width: int):
    paths = [p for d in range(1, depth + 1) for p in product(range(width), repeat=d)]
    for chosen in combinations(paths, nodes):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            yield tree_from_paths([list(p) for p in chosen])


def test_walks_follow_the_ranks_as_far_as_the_tree_goes():
    t = table((0, 0, 0), (1, 0, 0), (0, 1, 0), (X, 0, 0), (2, 0, X), (0, X, X))
    assert walk_tree(t, chain(3)).tolist() == [3, 0, 1, 0, 0, 1]
    assert walk_tree(t, named_tree("default")).tolist() == [2, 2, 1, 0, 1, 1]
    assert walk_tree(t, OFF).tolist() == [0] * 6
    assert walk_full_tree(t, 2).tolist() == [3, 3, 3, 0, 0, 1]
    assert walk_full_tree(t, 1).tolist() == walk_tree(t, chain(3)).tolist()


def test_rounds_begin_where_the_last_one_ended_and_do_not_cross_texts():
    t = join_tables([table((0, 0), (0, 0), (1, 0), (0, 0)), table((1, 1), (0, X))], 2)
    rounds = replay(t, walk_tree(t, chain(2)))
    assert rounds.row.tolist() == [0, 3, 4, 5]
    assert rounds.accepted.tolist() == [2, 1, 0, 1]
    assert rounds.kept.tolist() == [3, 1, 1, 1], "nothing is kept past the end of a text"
    assert rounds.acceptance_length == 6 / 4
    assert rounds.reached(2) == (0.75, 0.25)


def test_without_texts_nothing_happens():
    empty = join_tables([], 3)
    assert len(replay(empty, walk_tree(empty, chain(2)))) == 0
    assert best_tree(empty, 4).num_nodes == 0


def test_a_tree_deeper_than_the_table_is_refused():
    with pytest.raises(ConfigError, match=r"'chain-4' has depth 4 .* depth 3"):
        walk_tree(table((0, 0, 0)), chain(4))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_most_frequent_paths_accept_as_much_as_any_tree(nodes):
    t = random_table(nodes, 90, depth=2)
    most = max(int(walk_tree(t, tree).sum()) for tree in all_trees(nodes, 2, 3))
    found = most_frequent_paths(t.rank, nodes)
    assert found.num_nodes == nodes
    assert walk_tree(t, found).sum() == most


@pytest.mark.parametrize("seed", range(8))
def test_the_best_tree_is_near_the_best_of_all_trees(seed):
    t = random_table(seed, 600, depth=3, width=2)
    lengths = [replay(t, walk_tree(t, tree)).acceptance_length for tree in all_trees(4, 3, 2)]
    found = best_tree(t, 4)
    length = replay(t, walk_tree(t, found)).acceptance_length
    assert found.name == "best-4" and found.num_nodes == 4
    assert length >= 0.985 * max(lengths)
    assert length > np.quantile(lengths, 0.8)


def test_paths_that_never_occur_are_left_out():
    t = table(*[(0, 1)] * 5)
    assert most_frequent_paths(t.rank, 9).paths == ((0,), (0, 1))
