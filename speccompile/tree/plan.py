"""The draft plan: how a head scores the candidates of one tree, one program call per depth.

Call 0 is ``draft_extend``; its last row scores the children of the root.  Call d >= 1 is a
``draft_step`` fed with the nodes of depth d that have children.  Fed nodes take suffix slots in the
order in which they are fed, so that the head's suffix holds nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from speccompile.tree.tree import Int64, Tree, packed_ancestors


@dataclass(frozen=True)
class DraftLevel:
    """The rows one request adds to ``draft_step`` call ``depth``; arrays are [n] for n fed nodes.

    ``row`` are tree rows, ``parent_row`` counts within the request's rows of the previous call,
    ``mask`` [n, words] covers the suffix slots of fed nodes, the first ``suffix_start`` of which
    were written by earlier calls.
    """

    depth: int
    row: Int64
    parent_row: Int64
    rank: Int64
    mask: Int64
    suffix_start: int


@dataclass(frozen=True)
class DraftPlan:
    """``levels[d - 1]`` is call d.  ``source_call`` / ``source_row`` [rows] say where the candidates of a
    node's parent were scored: the call, and the row within the request's rows of that call.  Row 0, the
    root, is not drafted and carries -1."""

    levels: tuple[DraftLevel, ...]
    source_call: Int64
    source_row: Int64


@lru_cache(maxsize=4096)
def draft_plan(tree: Tree) -> DraftPlan:
    """Plan of ``tree``; cached, as trees are few."""
    depth = tree.depth_of_row
    row_in_call = np.zeros(tree.rows, np.int64)  # the root is the only row of its request in call 0
    slot = np.full(tree.rows, -1, np.int64)
    fed: list[int] = []
    levels: list[DraftLevel] = []
    for level in range(1, tree.depth):
        rows = np.flatnonzero(tree.is_internal & (depth == level))
        row_in_call[rows] = np.arange(len(rows))
        start = len(fed)
        slot[rows] = start + np.arange(len(rows))
        fed += rows.tolist()
        parents = tree.parent[rows]
        mask = packed_ancestors(slot[tree.parent[fed]])[start:]
        levels.append(DraftLevel(level, rows, row_in_call[parents], tree.rank[rows], mask, start))
    above = tree.parent[1:]
    return DraftPlan(
        levels=tuple(levels),
        source_call=np.concatenate([[-1], depth[above]]),
        source_row=np.concatenate([[-1], row_in_call[above]]),
    )
