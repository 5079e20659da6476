"""A static draft tree: which candidates of which node are verified.

This module owns the shape and everything that follows from it alone: order of the rows, parents,
depths, ranks and the packed ancestor mask.  A node is named by its rank path, ``(0, 2)`` being the
third-best child of the best child of the root (the "choices" form of EAGLE-1 files).  Drafts are
counted without the root, so ``rows == num_nodes + 1`` rows are verified per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.errors import ConfigError

RankPath = tuple[int, ...]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """Nodes as rank paths ordered by (length, lexicographic); the root is row 0 and not listed.

    Two trees are equal when their nodes are; the name is only a label.
    Raises ConfigError for a malformed, repeated or orphaned path.
    """

    paths: tuple[RankPath, ...]
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        known: set[RankPath] = {()}
        for path in self.paths:
            if path in known:
                raise ConfigError(f"tree {self.name!r}: node {list(path)} is listed twice or is the root")
            if path[:-1] not in known:
                raise ConfigError(
                    f"tree {self.name!r}: node {list(path)} has no parent {list(path[:-1])} before it"
                )
            known.add(path)

    @property
    def num_nodes(self) -> int:
        """Draft tokens per round, root excluded."""
        return len(self.paths)

    @property
    def rows(self) -> int:
        """Rows verified per round: drafts + 1."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Largest number of drafts on one path; 0 for the tree ``off``."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def max_rank(self) -> int:
        """Largest rank in use; a head that proposes K candidates serves ranks below K.  -1 for ``off``."""
        return max((path[-1] for path in self.paths), default=-1)

    @cached_property
    def row_of(self) -> dict[RankPath, int]:
        return {path: row for row, path in enumerate(((), *self.paths))}

    @cached_property
    def parent(self) -> Int64:
        """[rows] row of the parent; -1 for the root."""
        return np.array([-1, *(self.row_of[path[:-1]] for path in self.paths)], np.int64)

    @cached_property
    def depth_of_row(self) -> Int64:
        """[rows] number of drafts from the root to the row; 0 for the root."""
        return np.array([0, *map(len, self.paths)], np.int64)

    @cached_property
    def rank(self) -> Int64:
        """[rows] rank among the candidates of the parent; 0 for the root, which has none."""
        return np.array([0, *(path[-1] for path in self.paths)], np.int64)

    @cached_property
    def mask(self) -> Int64:
        """[rows, words] packed ancestor mask: bit s of row r is set when s is r or an ancestor of r."""
        return packed_ancestors(self.parent)

    @cached_property
    def is_internal(self) -> NDArray[np.bool_]:
        """[rows] whether the row has children."""
        internal = np.zeros(self.rows, np.bool_)
        internal[self.parent[1:]] = True
        return internal

    @lru_cache(maxsize=4096)  # noqa: B019 - trees are few, small and hash by value
    def trimmed(self, max_nodes: int, max_depth: int) -> Tree:
        """The first ``max_nodes`` nodes no deeper than ``max_depth``: still a tree, as parents come first."""
        if max_nodes >= self.num_nodes and max_depth >= self.depth:
            return self
        kept = [path for path in self.paths if len(path) <= max_depth]
        return Tree(tuple(kept[: max(0, max_nodes)]), name=self.name)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "nodes": [list(path) for path in self.paths]}


def packed_ancestors(parent: Int64) -> Int64:
    """[n] parents (-1: none; parents first) -> [n, words] int64, bit s of row r: s is r or its ancestor."""
    words = np.zeros((len(parent), max(1, -(-len(parent) // 64))), np.uint64)
    for row, above in enumerate(parent):
        if above >= 0:
            words[row] = words[above]
        words[row, row // 64] |= np.uint64(1 << (row % 64))
    return words.view(np.int64)


def tree_from_paths(paths: Iterable[Sequence[int]], name: str = "custom") -> Tree:
    """Tree from rank paths in any order, e.g. ``[[0], [1], [0, 0]]``.  Raises ConfigError by node."""
    checked: list[RankPath] = []
    for path in paths:
        if (
            not isinstance(path, Sequence)
            or not path
            or not all(type(rank) is int and rank >= 0 for rank in path)
        ):
            raise ConfigError(
                f"tree {name!r}: node {path!r} must be a non-empty list of ranks (integers from 0)"
            )
        checked.append(tuple(path))
    return Tree(tuple(sorted(checked, key=lambda path: (len(path), path))), name=name)


def tree_from_json(data: Any) -> Tree:
    """Inverse of :meth:`Tree.to_json`.  Raises ConfigError for anything else."""
    if not isinstance(data, dict) or set(data) != {"name", "nodes"} or not isinstance(data["nodes"], list):
        raise ConfigError('a tree must be an object with exactly the keys "name" and "nodes" (a list)')
    return tree_from_paths(data["nodes"], name=str(data["name"]))
