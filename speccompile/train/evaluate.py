"""Acceptance of a head on rollouts, as an engine would see it, from teacher-forced draft steps.

The text of a rollout is what an engine emits for its prompt (greedy, or sampled with the recorded seed), so
the rank vectors of :mod:`speccompile.train.ranks` say what any tree accepts, and the engine's rounds are
replayed: each begins where the last one ended.  An average over all positions would flatter the head,
because easy stretches are crossed in few rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from speccompile.model.eagle import EagleHead
from speccompile.ops.draft import draft_scores
from speccompile.train.batches import Batch
from speccompile.train.ranks import SamplingLaw, rank_sequences
from speccompile.tree.replay import RankTable, Rounds, join_tables, replay, walk_full_tree, walk_tree
from speccompile.tree.tree import Tree

_GREEDY_AGREEMENT = 0.97
_SAMPLED_AGREEMENT, _SAMPLED_TOKENS = 0.75, 24
CONTEXT_EDGES = (0, 256, 512, 1024, 2048)
"""Where the context-length buckets begin, in tokens before the root of a round; the last one is open."""


def context_name(bucket: int) -> str:
    """A context-length bucket in words, such as ``256-511`` or ``2048+``."""
    if bucket + 1 == len(CONTEXT_EDGES):
        return f"{CONTEXT_EDGES[bucket]}+"
    return f"{CONTEXT_EDGES[bucket]}-{CONTEXT_EDGES[bucket + 1] - 1}"


@dataclass(frozen=True)
class Acceptance:
    """``chain[d]``, ``tree[d]``: share of rounds in which at least d + 1 drafts are accepted, with one
    candidate per depth and with ``branch`` candidates per node; ``rounds`` counts the chain's rounds.
    The lengths are tokens per target call (accepted drafts + bonus)."""

    chain: tuple[float, ...]
    tree: tuple[float, ...]
    chain_length: float
    tree_length: float
    branch: int
    rounds: int


@dataclass(frozen=True)
class TreeResult:
    """What one tree accepts: overall, and by context bucket (``rounds`` and ``length`` of each)."""

    name: str
    nodes: int
    depth: int
    rounds: int
    length: float
    reached: tuple[float, ...]
    context_rounds: tuple[int, ...]
    context_length: tuple[float, ...]


@dataclass(frozen=True)
class RankShares:
    """Ranks of accepted drafts over the rounds of the full tree with ``branch`` candidates per node.

    ``marginal[d][k]``: share of all rounds that accept a draft at depth d + 1 and it has rank k.
    ``conditional[d][k]``: the same among rounds that accept depth d (the parent; the root for d = 0).
    """

    marginal: tuple[tuple[float, ...], ...]
    conditional: tuple[tuple[float, ...], ...]


@torch.no_grad()
def greedy_mask(batch: Batch, lm_head: nn.Linear) -> Tensor:
    """Which sequences of a batch the target decoded greedily, bool [B]: its best token is the text's."""
    column = torch.arange(batch.hidden.shape[1], device=batch.token.device)
    wanted = batch.supervised[:, 1:] & (column < batch.length[:, None])
    best = lm_head(batch.hidden[wanted].to(lm_head.weight.dtype)).argmax(-1)
    hits = torch.zeros(wanted.shape, device=wanted.device)
    hits[wanted] = (best == batch.token[:, 1:][wanted]).float()
    return hits.sum(1) / wanted.sum(1).clamp(min=1) >= _GREEDY_AGREEMENT


@torch.no_grad()
def sampled_mask(batch: Batch, lm_head: nn.Linear, law: SamplingLaw) -> Tensor:
    """Which sequences the noise of ``law`` draws, bool [B], judged by their first answer tokens."""
    column = torch.arange(batch.hidden.shape[1], device=batch.token.device)
    wanted = batch.supervised[:, 1:] & (column < batch.length[:, None])
    wanted &= wanted.cumsum(1) <= _SAMPLED_TOKENS
    b, i = wanted.nonzero(as_tuple=True)
    logits = lm_head(batch.hidden[b, i].to(lm_head.weight.dtype)).float()
    ids = torch.arange(logits.shape[1], device=logits.device)
    drawn = draft_scores(logits, ids, law.seed[b], i + 1, law.temperature[b]).argmax(1)
    hits = torch.zeros(wanted.shape, device=wanted.device)
    hits[b, i] = (drawn == batch.token[b, i + 1]).float()
    return hits.sum(1) / wanted.sum(1).clamp(min=1) >= _SAMPLED_AGREEMENT


def greedy_rows(batch: Batch, lm_head: nn.Linear) -> Batch | None:
    """The sequences of a batch that the target decoded greedily; None when there are none."""
    rows = greedy_mask(batch, lm_head)
    if not rows.any():
        return None
    fields = (batch.token, batch.supervised, batch.hidden, batch.feature, batch.length)
    return Batch(*(x[rows] for x in fields))


def measure_acceptance(
    head: EagleHead, token_ids: Tensor, batches: Iterable[Batch], depth: int = 4, branch: int = 3
) -> Acceptance:
    """Replays the greedy sequences of ``batches`` with a chain and a full tree of ``depth``."""
    tables = [table for batch in batches for table in rank_sequences(head, token_ids, batch, depth, branch)]
    table = join_tables(tables, depth)
    chain, tree = (replay(table, walk_full_tree(table, k)) for k in (1, branch))
    return Acceptance(
        chain.reached(depth), tree.reached(depth),
        chain.acceptance_length, tree.acceptance_length, branch, len(chain),
    )  # fmt: skip


def tree_result(table: RankTable, tree: Tree) -> TreeResult:
    """Replays ``tree`` over ``table``."""
    rounds = replay(table, walk_tree(table, tree))
    buckets = _by_context(table, rounds)
    return TreeResult(
        name=tree.name,
        nodes=tree.num_nodes,
        depth=tree.depth,
        rounds=len(rounds),
        length=rounds.acceptance_length,
        reached=rounds.reached(tree.depth),
        context_rounds=tuple(len(r) for r in buckets),
        context_length=tuple(r.acceptance_length for r in buckets),
    )


def _by_context(table: RankTable, rounds: Rounds) -> Sequence[Rounds]:
    bucket = np.searchsorted(CONTEXT_EDGES, table.position[rounds.row], side="right") - 1
    return [rounds.within(bucket == b) for b in range(len(CONTEXT_EDGES))]


def rank_shares(table: RankTable, branch: int) -> RankShares:
    """Ranks that the full tree of ``branch`` candidates per node accepts, by depth."""
    rounds = replay(table, walk_full_tree(table, branch))
    rank = table.rank[rounds.row]
    marginal, conditional, parents = [], [], len(rounds)
    for d in range(table.depth):
        accepted = rank[rounds.accepted > d, d]
        counts = np.bincount(accepted, minlength=branch)
        marginal.append(tuple((counts / max(1, len(rounds))).tolist()))
        conditional.append(tuple((counts / max(1, parents)).tolist()))
        parents = len(accepted)
    return RankShares(tuple(marginal), tuple(conditional))
