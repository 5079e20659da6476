"""Rank vectors drawn from the shares that ``eval-draft`` prints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from speccompile.errors import ConfigError
from speccompile.tree.named import chain, named_tree
from speccompile.tree.replay import NOT_DRAFTED, replay, walk_full_tree, walk_tree
from speccompile.tune.statistics import read_statistics, sampled_table


def test_drawn_ranks_have_the_shares():
    table = sampled_table(np.array([[0.5, 0.2], [0.3, 0.1], [0.0, 0.0]]), 20000)
    first = [(table.rank[:, 0] == k).mean() for k in (0, 1, NOT_DRAFTED)]
    assert first == pytest.approx([0.5, 0.2, 0.3], abs=0.015)
    again = table.rank[table.rank[:, 0] != NOT_DRAFTED, 1]
    assert [(again == k).mean() for k in (0, 1)] == pytest.approx([0.3, 0.1], abs=0.015)
    assert (table.rank[:, 2] == NOT_DRAFTED).all()
    assert replay(table, walk_tree(table, chain(2))).acceptance_length == pytest.approx(1.65, abs=0.02)
    assert (walk_full_tree(table, 2) <= 2).all()


def test_groups_are_averaged_by_their_positions(tmp_path):
    groups = [
        {"positions": 100, "ranks": {"marginal": [[0.8, 0.1], [0.4, 0.0]]}},
        {"positions": 300, "ranks": {"marginal": [[0.4, 0.1], [0.0, 0.0]]}},
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"groups": groups, "trees": []}))
    table = read_statistics(file, max_depth=8, draft_topk=8)
    assert table.depth == 2
    assert (table.rank[:, 0] == 0).mean() == pytest.approx(0.5, abs=0.02)
    # 0.1 of all rounds go on, which is a sixth of the 0.6 that accept the first draft
    assert walk_tree(table, named_tree("default")).mean() == pytest.approx(0.7, abs=0.03)
    narrow = read_statistics(file, max_depth=1, draft_topk=1)
    assert narrow.depth == 1 and set(np.unique(narrow.rank)) == {0, NOT_DRAFTED}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"groups": []}',
        '{"groups": [{"positions": 1}]}',
        '{"groups": [{"positions": 1, "ranks": {"marginal": [[0.5], [0.6]]}}]}',
        '{"groups": [{"positions": 1, "ranks": {"marginal": [[-0.5]]}}]}',
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, text):
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"s\.json: "):
        read_statistics(file, max_depth=8, draft_topk=8)
    with pytest.raises(ConfigError, match=r"absent\.json: "):
        read_statistics(tmp_path / "absent.json", max_depth=8, draft_topk=8)
