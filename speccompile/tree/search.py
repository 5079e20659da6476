"""The static tree that accepts most, from rank vectors.

For fixed round starts the tokens a tree accepts are the sum over its nodes of how often the true tokens take
the node's path.  A path is never more frequent than its beginning, so the most frequent paths form a tree,
and no other tree of as many nodes accepts more.  Which rounds start where depends on the tree in turn, so the
choice is repeated on the rounds of the last tree until nothing changes.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from speccompile.tree.replay import NOT_DRAFTED, RankTable, replay, walk_tree
from speccompile.tree.tree import RankPath, Tree, tree_from_paths

_MAX_REPEATS = 32


def most_frequent_paths(rank_ND: NDArray[np.uint8], nodes: int, name: str = "custom") -> Tree:
    """The at most ``nodes`` most frequent rank paths; paths that never occur are left out.

    Ties go to the shorter, then to the lower path, so the choice is deterministic.
    """
    paths: list[RankPath] = []
    heap: list[tuple[int, int, RankPath]] = []

    def add_children(path: RankPath) -> None:
        depth = len(path)
        if depth == rank_ND.shape[1]:
            return
        follows = (rank_ND[:, :depth] == np.array(path, np.uint8)).all(1)
        for rank, count in enumerate(np.bincount(rank_ND[follows, depth], minlength=1).tolist()):
            if count and rank != NOT_DRAFTED:
                heapq.heappush(heap, (-count, depth + 1, (*path, rank)))

    add_children(())
    while heap and len(paths) < nodes:
        paths.append(heapq.heappop(heap)[2])
        add_children(paths[-1])
    return tree_from_paths(paths, name=name)


def best_tree(table: RankTable, nodes: int) -> Tree:
    """The tree of at most ``nodes`` drafts (the root is not one) with the longest acceptance found.

    Exact for the rounds of the tree itself when the repetition settles; when it turns in a circle, the
    best tree seen.  Named ``best-NODES``.
    """
    name = f"best-{nodes}"
    seen: dict[Tree, float] = {}
    tree = most_frequent_paths(table.rank, nodes, name)
    while tree not in seen and len(seen) < _MAX_REPEATS:
        rounds = replay(table, walk_tree(table, tree))
        seen[tree] = rounds.acceptance_length
        tree = most_frequent_paths(table.rank[rounds.row], nodes, name)
    return max(seen, key=lambda t: seen[t])
