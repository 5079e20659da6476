"""Acceptance of a head on rollouts, as an engine would see it, from teacher-forced draft steps.

Only sequences that the target decoded greedily are scored: there the text itself is what a greedy engine
emits, so draft step s of column i is accepted exactly when the engine accepts depth s + 1 of a chain (or of a
full tree with K candidates per node) drawn after position i.  The engine's rounds are then replayed: each
begins where the last one ended.  An average over all positions would flatter the head, because easy
stretches are crossed in few rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speccompile.model.eagle import EagleHead
from speccompile.train.batches import Batch
from speccompile.train.unroll import unroll

_GREEDY_AGREEMENT = 0.97


@dataclass(frozen=True)
class Acceptance:
    """``chain[d]``, ``tree[d]``: share of rounds in which at least d + 1 drafts are accepted, with one
    candidate per depth and with ``branch`` candidates per node; ``rounds`` counts the chain's rounds."""

    chain: tuple[float, ...]
    tree: tuple[float, ...]
    branch: int
    rounds: int

    @property
    def chain_length(self) -> float:
        """Acceptance length (accepted + bonus tokens per round) of a chain as deep as was measured."""
        return 1 + sum(self.chain)

    @property
    def tree_length(self) -> float:
        """Acceptance length of the full tree with ``branch`` candidates per node."""
        return 1 + sum(self.tree)


@torch.no_grad()
def greedy_rows(batch: Batch, lm_head: nn.Linear) -> Batch | None:
    """The sequences of a batch that the target decoded greedily; None when there are none."""
    column = torch.arange(batch.hidden.shape[1])
    wanted = batch.supervised[:, 1:] & (column < batch.length[:, None])
    best = lm_head(batch.hidden[wanted].to(lm_head.weight.dtype)).argmax(-1)
    hits = torch.zeros(wanted.shape)
    hits[wanted] = (best == batch.token[:, 1:][wanted]).float()
    rows = hits.sum(1) / wanted.sum(1).clamp(min=1) >= _GREEDY_AGREEMENT
    if not rows.any():
        return None
    fields = (batch.token, batch.supervised, batch.hidden, batch.feature, batch.length)
    return Batch(*(x[rows] for x in fields))


@torch.no_grad()
def accepted_drafts(
    head: EagleHead, token_ids: Tensor, batch: Batch, depth: int, branches: tuple[int, ...]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Per column: whether its next ``depth`` tokens are all supervised, bool [B, C]; and, by number of
    candidates, how many of them are drafted, i64 [B, C]."""
    label = batch.supervised & (torch.arange(batch.token.shape[1]) <= batch.length[:, None])
    columns = max(0, batch.feature.shape[1] - depth)
    usable = torch.stack([label[:, 2 + s : 2 + s + columns] for s in range(depth)]).all(0)
    alive = {k: torch.ones_like(usable) for k in branches}
    count = {k: torch.zeros(usable.shape, dtype=torch.int64) for k in branches}
    feature = batch.feature.to(head.embed_tokens.weight.dtype)
    for s, (_, scored) in enumerate(unroll(head, batch.token, feature, depth)):
        top = head.lm_head(scored[:, :columns]).topk(max(branches), dim=-1).indices
        hit = token_ids[top] == batch.token[:, 2 + s : 2 + s + columns, None]
        for k in branches:
            alive[k] = alive[k] & hit[..., :k].any(-1)
            count[k] += alive[k]
    return usable, count


def replay_rounds(usable: list[bool], accepted: list[int]) -> list[int]:
    """Accepted drafts of every round of an engine that walks through one sequence."""
    rounds, column = [], 0
    while column < len(usable):
        if usable[column]:
            rounds.append(accepted[column])
            column += accepted[column]
        column += 1
    return rounds


def measure_acceptance(
    head: EagleHead, token_ids: Tensor, batches: Iterable[Batch], depth: int = 4, branch: int = 3
) -> Acceptance:
    """Replays all sequences of ``batches`` with a chain and a full tree of ``depth``."""
    rounds: dict[int, list[int]] = {1: [], branch: []}
    for batch in batches:
        usable, accepted = accepted_drafts(head, token_ids, batch, depth, tuple(rounds))
        for k, count in accepted.items():
            for row, counts in zip(usable.tolist(), count.tolist(), strict=True):
                rounds[k] += replay_rounds(row, counts)

    def shares(done: list[int]) -> tuple[float, ...]:
        return tuple(sum(n > d for n in done) / max(1, len(done)) for d in range(depth))

    return Acceptance(shares(rounds[1]), shares(rounds[branch]), branch, len(rounds[1]))
