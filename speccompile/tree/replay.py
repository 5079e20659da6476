"""Rounds of an engine replayed from rank vectors, for any static tree, without running a model.

The draft state of a tree node depends on the node's own path alone.  So if r_1 .. r_D are the ranks that the
true next tokens have in the head's ordering, each draft step fed with the true tokens before it, a tree
accepts exactly the drafts of its longest path (r_1, .., r_d).  One table of ranks therefore tells what every
tree accepts.  Legend: N positions at which a round could start, D draft depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speccompile.errors import ConfigError
from speccompile.tree.tree import Int64, Tree

NOT_DRAFTED = 255
"""Rank of a token that is past the end of its text, outside the draft vocabulary, or ranked too low."""


@dataclass(frozen=True)
class RankTable:
    """Ranks of whole texts, joined end to end; row n stands for a round whose root is one text token.

    ``rank`` u8 [N, D]: of the D tokens after the root.  ``left`` i32 [N]: tokens of the text after the root,
    so rows of one text count down to 1.  ``position`` i32 [N]: absolute position of the root.
    """

    rank: NDArray[np.uint8]
    left: NDArray[np.int32]
    position: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.left)

    @property
    def depth(self) -> int:
        """Draft depths D that were measured."""
        return self.rank.shape[1]


@dataclass(frozen=True)
class Rounds:
    """Rounds in the order of the text: their table ``row``, ``accepted`` drafts and ``kept`` tokens, i64.

    Kept are the accepted drafts and the target's own bonus token, except past the end of the text.
    """

    row: Int64
    accepted: Int64
    kept: Int64

    def __len__(self) -> int:
        return len(self.row)

    @property
    def acceptance_length(self) -> float:
        """Kept tokens per target call (accepted drafts + bonus); 0.0 without rounds."""
        return float(self.kept.sum()) / len(self) if len(self) else 0.0

    def reached(self, depth: int) -> tuple[float, ...]:
        """Share of the rounds that accept at least 1, 2, .. ``depth`` drafts."""
        return tuple(float((self.accepted >= d).sum()) / max(1, len(self)) for d in range(1, depth + 1))

    def within(self, chosen: NDArray[np.bool_]) -> Rounds:
        """The rounds for which ``chosen`` [rounds] holds."""
        return Rounds(self.row[chosen], self.accepted[chosen], self.kept[chosen])


def join_tables(tables: Sequence[RankTable], depth: int) -> RankTable:
    """One table of all texts; ``depth`` is that of the tables (there may be none)."""
    return RankTable(
        np.concatenate([np.zeros((0, depth), np.uint8), *(t.rank for t in tables)]),
        np.concatenate([np.zeros(0, np.int32), *(t.left for t in tables)]),
        np.concatenate([np.zeros(0, np.int32), *(t.position for t in tables)]),
    )


def walk_tree(table: RankTable, tree: Tree) -> Int64:
    """Drafts that ``tree`` accepts in a round at each row, i64 [N].  Raises ConfigError for a deeper tree."""
    if tree.depth > table.depth or tree.max_rank >= NOT_DRAFTED:
        raise ConfigError(
            f"tree {tree.name!r} has depth {tree.depth} and ranks up to {tree.max_rank}; the ranks were "
            f"measured to depth {table.depth} and rank {NOT_DRAFTED - 1}"
        )
    outside, unlisted = tree.rows, tree.max_rank + 1
    child = np.full((tree.rows + 1, unlisted + 1), outside)
    child[tree.parent[1:], tree.rank[1:]] = np.arange(1, tree.rows)
    node, accepted = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    for d in range(tree.depth):
        node = child[node, np.minimum(table.rank[:, d], unlisted)]
        accepted += node != outside
    return accepted


def walk_full_tree(table: RankTable, branch: int) -> Int64:
    """The same for the tree of all paths of the ``branch`` best candidates per node, to the table's depth."""
    return np.cumprod(table.rank < branch, axis=1, dtype=np.int64).sum(1)


def replay(table: RankTable, accepted: Int64) -> Rounds:
    """The rounds that happen, each starting where the last one ended; ``accepted`` [N] as of a walk."""
    kept = np.minimum(accepted + 1, table.left)
    step, row, rows = kept.tolist(), 0, []
    while row < len(step):  # after a text's last token comes the first row of the next text
        rows.append(row)
        row += step[row]
    chosen = np.array(rows, np.int64)
    return Rounds(chosen, accepted[chosen], kept[chosen])
