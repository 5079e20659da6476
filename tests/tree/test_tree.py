"""Trees: order, parents, masks, plans, names, files and the drawing."""

from __future__ import annotations

import json
import random

import pytest

from speccompile.errors import ConfigError
from speccompile.tree.draw import draw
from speccompile.tree.named import OFF, chain, check_tree, named_tree, resolve_tree
from speccompile.tree.plan import draft_plan
from speccompile.tree.tree import Tree, tree_from_json, tree_from_paths


def random_tree(seed: int, nodes: int, branch: int = 4, depth: int = 9) -> Tree:
    rng = random.Random(seed)
    paths: set[tuple[int, ...]] = set()
    while len(paths) < nodes:
        parent = rng.choice([(), *sorted(paths)])
        if len(parent) < depth:
            paths.add((*parent, rng.randrange(branch)))
    return tree_from_paths(sorted(paths, key=lambda _: rng.random()))


def bits(words) -> set[int]:
    return {64 * w + b for w, word in enumerate(words) for b in range(64) if int(word) >> b & 1}


def ancestors(path: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {path[:length] for length in range(len(path) + 1)}


TREES = [OFF, chain(1), chain(70), named_tree("mc_sim_7b_63"), named_tree("default"), named_tree("deep-15")]
TREES += [random_tree(seed, nodes) for seed, nodes in enumerate([1, 5, 20, 63, 64, 130])]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_rows_parents_and_masks(tree: Tree) -> None:
    nodes = [(), *tree.paths]
    assert tree.rows == tree.num_nodes + 1 == len(nodes)
    assert list(tree.paths) == sorted(tree.paths, key=lambda path: (len(path), path))
    for row, path in enumerate(nodes):
        assert tree.depth_of_row[row] == len(path)
        assert {nodes[slot] for slot in bits(tree.mask[row])} == ancestors(path)
        if path:
            assert nodes[tree.parent[row]] == path[:-1]
            assert tree.rank[row] == path[-1]
            assert tree.parent[row] < row
    assert tree.depth == max(map(len, nodes))
    assert tree.max_rank == max((path[-1] for path in tree.paths), default=-1)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_draft_plan_feeds_each_internal_node_once_and_finds_every_candidate(tree: Tree) -> None:
    nodes, plan = [(), *tree.paths], draft_plan(tree)
    internal = {path[:-1] for path in tree.paths}
    fed = [nodes[row] for level in plan.levels for row in level.row]
    assert sorted(fed) == sorted(internal - {()})
    calls = [[()]] + [[nodes[row] for row in level.row] for level in plan.levels]
    start = 0
    for call, level in enumerate(plan.levels, start=1):
        assert level.suffix_start == start
        for index, path in enumerate(calls[call]):
            assert len(path) == level.depth == call
            assert calls[call - 1][level.parent_row[index]] == path[:-1]
            assert level.rank[index] == path[-1]
            assert {fed[slot] for slot in bits(level.mask[index])} == ancestors(path) - {()}
        start += len(level.row)
    for row in range(1, tree.rows):
        assert calls[plan.source_call[row]][plan.source_row[row]] == nodes[row][:-1]


def test_mc_sim_has_26_rows_and_named_sizes() -> None:
    tree = named_tree("mc_sim_7b_63")
    assert (tree.num_nodes, tree.rows, tree.depth, tree.max_rank) == (25, 26, 5, 3)
    assert named_tree("default").rows == 6
    assert named_tree("deep-15").rows == 16
    assert chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert OFF.rows == 1 and OFF.depth == 0


@pytest.mark.parametrize(
    ("paths", "hint"),
    [
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] has no parent \[0, 0\]"),
        ([[0], [0]], r"\[0\] is listed twice"),
        ([[]], "non-empty list"),
        ([[0], [-1]], "integers from 0"),
        ([[0], ["1"]], "integers from 0"),
        ([3], "non-empty list"),
        ([[True]], "integers from 0"),
    ],
)
def test_bad_trees_are_named(paths, hint) -> None:
    with pytest.raises(ConfigError, match=hint):
        tree_from_paths(paths)


def test_resolve_from_every_form(tmp_path) -> None:
    tree = named_tree("mc_sim_7b_63")
    nodes = [list(path) for path in tree.paths]
    (tmp_path / "a.json").write_text(json.dumps(nodes))
    (tmp_path / "b.yaml").write_text("name: mine\nnodes: [[0], [1], [0, 0]]\n")
    assert resolve_tree(str(tmp_path / "a.json")) == tree
    assert resolve_tree(tmp_path / "b.yaml").name == "mine"
    assert resolve_tree(nodes[::-1]) == tree
    assert resolve_tree("[[0], [1]]").paths == ((0,), (1,))
    assert tree_from_json(json.loads(json.dumps(tree.to_json()))) == tree
    assert tree_from_json(tree.to_json()).name == tree.name
    for bad in ("chain-0", "chain-x", "nope", "[[0]", 3, {"nodes": []}):
        with pytest.raises(ConfigError):
            resolve_tree(bad)
    (tmp_path / "c.json").write_text("[[0, 0]]")
    with pytest.raises(ConfigError, match=r"c\.json.*has no parent"):
        resolve_tree(tmp_path / "c.json")
    with pytest.raises(ConfigError, match=r"gone\.json"):
        resolve_tree(tmp_path / "gone.json")


def test_trimmed_is_a_tree_within_both_limits() -> None:
    tree = named_tree("mc_sim_7b_63")
    for nodes in range(26):
        for depth in range(6):
            trimmed = tree.trimmed(nodes, depth)  # the constructor checks that parents stay
            assert trimmed.num_nodes <= nodes and trimmed.depth <= depth
            assert set(trimmed.paths) <= set(tree.paths)
    assert tree.trimmed(25, 5) is tree
    assert tree.trimmed(0, 5) == OFF == tree.trimmed(-1, 5)


def test_check_tree_names_the_limit() -> None:
    tree = named_tree("mc_sim_7b_63")
    check_tree(tree, draft_topk=4, max_depth=5, max_rows=26)
    for key, limits in {
        "draft_topk": {"draft_topk": 3, "max_depth": 5, "max_rows": 26},
        "max_tree_depth": {"draft_topk": 4, "max_depth": 4, "max_rows": 26},
        "max_rows": {"draft_topk": 4, "max_depth": 5, "max_rows": 25},
    }.items():
        with pytest.raises(ConfigError, match=key):
            check_tree(tree, **limits)


def test_drawing_shows_every_row_under_its_parent() -> None:
    text = draw(tree_from_paths([[0], [1], [0, 0], [0, 2]]))
    assert text.splitlines()[:5] == ["0:root", "├─1:0", "│ ├─3:0", "│ └─4:2", "└─2:1"]
    assert text.endswith("4 drafts, depth 2, 5 rows (drafts + 1)")
