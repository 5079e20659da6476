"""The trees of all decoding requests of a round, flattened once into the arrays of every call.

Everything here depends on the trees alone, so a forest is built once per combination of trees and
reused by every round that has it.  Legend: G requests (one tree each), T rows of all trees,
n rows of one draft call, W mask words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.tree.plan import DraftLevel, draft_plan
from speccompile.tree.tree import Int64, Tree

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one call whatever their requests hold: ``member`` [requests] are the requests taking
    part (indices into the forest), ``owner`` [rows] the request of each row, ``mask`` [rows, W],
    ``cu_rows`` i32 [requests + 1]."""

    member: Int64
    owner: Int64
    mask: Int64
    cu_rows: Array


@dataclass(frozen=True, kw_only=True)
class ForestLevel:
    """``draft_step`` call ``depth``; ``parent_row`` [n] indexes the outputs of the call before."""

    depth: int
    rows: Rows
    parent_row: Int64
    rank: Int64
    suffix_start: Array


@dataclass(frozen=True, kw_only=True)
class Forest:
    """``drafting`` [G'] are the requests whose tree is not ``off``, in the row order of call 0.

    ``token_source`` [T] indexes the concatenation of the roots [G] and the candidates of all draft
    calls, flattened; ``parent`` [T] is -1 at roots.
    """

    rows: Rows
    depth: Int64
    parent: Int64
    drafting: Int64
    levels: tuple[ForestLevel, ...]
    token_source: Int64


@lru_cache(maxsize=512)
def make_forest(trees: tuple[Tree, ...], draft_topk: int, mask_words: int) -> Forest:
    """Forest of ``trees`` for programs with ``draft_topk`` candidates and ``mask_words`` words."""
    everyone = range(len(trees))
    rows = _rows(everyone, [tree.mask for tree in trees], mask_words)
    drafting = np.array([g for g in everyone if trees[g].num_nodes], np.int64)
    # first_row[call][g]: where the rows of request g begin in the outputs of that draft call
    first_row = [dict(zip(drafting.tolist(), range(len(drafting)), strict=True))]
    levels = []
    for depth in range(1, max((tree.depth for tree in trees), default=0)):
        members = [g for g in everyone if trees[g].depth > depth]
        level = _level(
            members, [draft_plan(trees[g]).levels[depth - 1] for g in members], first_row[-1], mask_words
        )
        first_row.append(dict(zip(members, level.rows.cu_rows.tolist(), strict=False)))
        levels.append(level)
    sizes = [len(drafting), *(len(level.rank) for level in levels)]
    return Forest(
        rows=rows,
        depth=_concat([tree.depth_of_row for tree in trees]),
        parent=_concat([np.where(t.parent < 0, -1, t.parent + rows.cu_rows[g]) for g, t in enumerate(trees)]),
        drafting=drafting,
        levels=tuple(levels),
        token_source=_token_source(trees, first_row, sizes, draft_topk),
    )


def _concat(parts: list[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _rows(members: Any, masks: list[Int64], mask_words: int) -> Rows:
    counts = [len(mask) for mask in masks]
    wide = np.zeros((sum(counts), mask_words), np.int64)
    cu_rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    for start, mask in zip(cu_rows, masks, strict=False):
        wide[start : start + len(mask), : mask.shape[1]] = mask
    member = np.array(members, np.int64)
    return Rows(member=member, owner=np.repeat(member, counts), mask=wide, cu_rows=cu_rows)


def _level(
    members: list[int], plans: list[DraftLevel], first_row: dict[int, int], mask_words: int
) -> ForestLevel:
    return ForestLevel(
        depth=plans[0].depth,
        rows=_rows(members, [plan.mask for plan in plans], mask_words),
        parent_row=_concat([plan.parent_row + first_row[g] for g, plan in zip(members, plans, strict=True)]),
        rank=_concat([plan.rank for plan in plans]),
        suffix_start=np.array([plan.suffix_start for plan in plans], np.int32),
    )


def _token_source(
    trees: tuple[Tree, ...], first_row: list[dict[int, int]], sizes: list[int], draft_topk: int
) -> Int64:
    before_call = np.concatenate([[0], np.cumsum(sizes)])
    parts = []
    for g, tree in enumerate(trees):
        plan = draft_plan(tree)
        first = np.array([call.get(g, 0) for call in first_row], np.int64)
        candidate_row = (before_call[:-1] + first)[plan.source_call] + plan.source_row
        source = len(trees) + candidate_row * draft_topk + tree.rank
        source[0] = g
        parts.append(source)
    return _concat(parts)
