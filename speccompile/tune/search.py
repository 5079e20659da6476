"""The trees that gain most, from rank vectors and measured costs.

Tokens per second of a tree are its tokens per round over the seconds of its round.  For fixed round starts
the tokens are a sum over nodes, a node's path is never more frequent than its beginning, and so the most
frequent paths of at most n nodes and d levels keep more tokens than any other tree within n and d
(:mod:`speccompile.tree.search`).  If a round's seconds depended on n and d alone, the best of these trees
over all n and d would be the best of all.  They also depend, a little, on how many nodes each ``draft_step``
is fed, which the choice for a given n and d ignores but the comparison between them counts; and round starts
depend on the tree, which the repetition settles.  Against all trees of tiny cases the loss is below 1 %
(tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.tree.named import OFF, TREE_NAMES, chain, named_tree
from speccompile.tree.replay import NOT_DRAFTED, RankTable, replay, walk_tree
from speccompile.tree.search import best_tree
from speccompile.tree.tree import Tree
from speccompile.tune.costs import LoadCosts

_NODES = (*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48, 56, 63)
_MIN_ROUNDS = 100


@dataclass(frozen=True)
class Candidate:
    """A tree and the tokens it keeps per round, accepted drafts + bonus, by context bucket."""

    tree: Tree
    tokens: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The tree of one cell, what it is expected to do, and plain decoding beside it.

    ``tokens_per_round`` per request; the speeds are tokens per second of all requests together.
    """

    batch: int
    context: int
    tree: Tree
    tokens_per_round: float
    round_s: float
    tokens_per_s: float
    off_tokens_per_s: float

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.off_tokens_per_s


def candidate_trees(table: RankTable, *, max_nodes: int, max_depth: int) -> list[Tree]:
    """``off``, chains, named trees, and for every size and depth the tree that accepts most.

    None is wider than the ranks of ``table`` go, which are those an engine offers.
    """
    deepest = min(max_depth, table.depth)
    widest = int(table.rank[table.rank != NOT_DRAFTED].max(initial=0)) + 1
    fixed = [*map(chain, range(1, deepest + 1)), *(named_tree(n) for n in TREE_NAMES if n != "chain-D")]
    found = {t: t for t in fixed if t.num_nodes <= max_nodes and t.depth <= deepest and t.max_rank < widest}
    for depth in range(1, deepest + 1):
        shallow = RankTable(table.rank[:, :depth], table.left, table.position)
        for nodes in _NODES:
            if depth <= nodes <= max_nodes:
                tree = best_tree(shallow, nodes)
                name = f"tuned-{tree.num_nodes}x{tree.depth}"
                found.setdefault(tree, Tree(tree.paths, name=name))
    return list(found.values())


def score(table: RankTable, trees: Sequence[Tree], contexts: Sequence[int]) -> list[Candidate]:
    """Tokens per round of every tree, by context bucket (each ends at its number, the last is open).

    A bucket with few rounds is given the average over all.
    """
    out = []
    for tree in trees:
        rounds = replay(table, walk_tree(table, tree))
        bucket = np.minimum(np.searchsorted(contexts, table.position[rounds.row]), len(contexts) - 1)
        parts = [rounds.within(bucket == b) for b in range(len(contexts))]
        used = [part if len(part) >= _MIN_ROUNDS else rounds for part in parts]
        out.append(Candidate(tree, tuple(part.acceptance_length for part in used)))
    return out


def choose(candidates: Sequence[Candidate], costs: LoadCosts, bucket: int, *, margin: float) -> Choice:
    """The fastest candidate at one load; ``off`` unless another is at least ``margin`` times as fast."""
    plain = _choice(Candidate(OFF, (1.0,) * (bucket + 1)), costs, bucket, None)
    choices = [_choice(c, costs, bucket, plain) for c in candidates if c.tree.num_nodes]
    best = max(choices, key=lambda choice: choice.tokens_per_s, default=plain)
    return best if best.gain >= margin else plain


def _choice(candidate: Candidate, costs: LoadCosts, bucket: int, plain: Choice | None) -> Choice:
    tokens = candidate.tokens[bucket]
    seconds = costs.round_seconds(candidate.tree, tokens)
    speed = costs.batch * tokens / seconds
    return Choice(
        batch=costs.batch,
        context=costs.context,
        tree=candidate.tree,
        tokens_per_round=tokens,
        round_s=seconds,
        tokens_per_s=speed,
        off_tokens_per_s=plain.tokens_per_s if plain else speed,
    )
