"""Acceptance of a head on held-out rollouts, estimated from teacher-forced draft steps.

Only sequences that the target decoded greedily are scored, where the text itself is what a greedy engine
would emit: draft step s of column i is then accepted exactly when the runtime would accept depth s + 1
of a chain (or of a full tree with K candidates per node) drawn after position i.
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
    """``chain[d]``, ``tree[d]``: probability that the first d + 1 drafts are accepted, with one candidate per
    depth and with ``branch`` candidates per node; ``rounds`` is the number of positions measured."""

    chain: tuple[float, ...]
    tree: tuple[float, ...]
    branch: int
    rounds: int

    @property
    def chain_length(self) -> float:
        """Acceptance length (accepted + bonus) of a chain as deep as was measured."""
        return 1 + sum(self.chain)

    @property
    def tree_length(self) -> float:
        """Acceptance length of the full tree with ``branch`` candidates per node."""
        return 1 + sum(self.tree)


@torch.no_grad()
def greedy_rows(batch: Batch, lm_head: nn.Linear) -> Batch | None:
    """The sequences of a batch that the target decoded greedily, with their supervised tokens unchanged."""
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
def measure_acceptance(
    head: EagleHead, token_ids: Tensor, batches: Iterable[Batch], depth: int = 4, branch: int = 3
) -> Acceptance:
    """Acceptance by depth over every position whose next ``depth`` tokens are supervised."""
    chain, tree, rounds = torch.zeros(depth), torch.zeros(depth), 0
    for batch in batches:
        known = torch.arange(batch.token.shape[1]) <= batch.length[:, None]
        label = batch.supervised & known
        columns = batch.feature.shape[1] - depth
        if columns < 1:
            continue
        full = torch.stack([label[:, 2 + s : 2 + s + columns] for s in range(depth)]).all(0)
        alive = {1: full, branch: full}
        feature = batch.feature.to(head.embed_tokens.weight.dtype)
        for s, (_, scored) in enumerate(unroll(head, batch.token, feature, depth)):
            top = head.lm_head(scored[:, :columns]).topk(branch, dim=-1).indices
            hit = token_ids[top] == batch.token[:, 2 + s : 2 + s + columns, None]
            for k in alive:
                alive[k] = alive[k] & hit[..., :k].any(-1)
            chain[s] += alive[1].sum()
            tree[s] += alive[branch].sum()
        rounds += int(full.sum())
    scale = 1 / max(1, rounds)
    return Acceptance(tuple((chain * scale).tolist()), tuple((tree * scale).tolist()), branch, rounds)
