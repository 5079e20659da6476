"""The tree table: which static tree runs at which load.

One tree per cell of (active requests, context length).  A cell serves every load up to its own that no
smaller cell serves, and the last row and column everything above; so a load between two measured ones is
treated as the heavier of the two, where speculation gains less.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from speccompile.errors import ConfigError
from speccompile.tree.tree import Tree, tree_from_json


@dataclass(frozen=True)
class TreeTable:
    """``cells[b][c]`` serves up to ``batch[b]`` active requests and ``context[c]`` tokens; both ascend.

    Raises ConfigError when the sizes do not ascend from 1 or do not match the cells.
    """

    batch: tuple[int, ...]
    context: tuple[int, ...]
    cells: tuple[tuple[Tree, ...], ...]

    def __post_init__(self) -> None:
        for name, sizes in (("batch", self.batch), ("context", self.context)):
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigError(f"tree table: {name} must be ascending whole numbers from 1, got {sizes}")
        if [len(row) for row in self.cells] != [len(self.context)] * len(self.batch):
            raise ConfigError(
                f"tree table: cells must hold {len(self.batch)} rows of {len(self.context)} trees"
            )

    def pick(self, active: int, context: float) -> Tree:
        """The tree for ``active`` requests that have read ``context`` tokens each, on average."""
        row = min(bisect_left(self.batch, active), len(self.batch) - 1)
        column = min(bisect_left(self.context, context), len(self.context) - 1)
        return self.cells[row][column]

    @cached_property
    def trees(self) -> tuple[Tree, ...]:
        """The different trees, in the order of the cells."""
        return tuple(dict.fromkeys(tree for row in self.cells for tree in row))

    @cached_property
    def max_rows(self) -> int:
        """Rows of the largest tree."""
        return max(tree.rows for tree in self.trees)

    @cached_property
    def speculates(self) -> bool:
        """Whether any tree has drafts."""
        return self.max_rows > 1

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": list(self.batch),
            "context": list(self.context),
            "cells": [[tree.to_json() for tree in row] for row in self.cells],
        }


def table_of_one(tree: Tree) -> TreeTable:
    """The table that always picks ``tree``."""
    return TreeTable((1,), (1,), ((tree,),))


def table_from_json(data: Any) -> TreeTable:
    """Inverse of :meth:`TreeTable.to_json`.  Raises ConfigError for anything else."""
    if not isinstance(data, dict) or set(data) != {"batch", "context", "cells"}:
        raise ConfigError("a tree table must be an object with exactly the keys batch, context and cells")
    for name in ("batch", "context"):
        if not isinstance(data[name], list) or not all(type(size) is int for size in data[name]):
            raise ConfigError(f"tree table: {name} must be a list of whole numbers")
    if not isinstance(data["cells"], list) or not all(isinstance(row, list) for row in data["cells"]):
        raise ConfigError("tree table: cells must be a list of lists of trees")
    cells = tuple(tuple(tree_from_json(tree) for tree in row) for row in data["cells"])
    return TreeTable(tuple(data["batch"]), tuple(data["context"]), cells)
