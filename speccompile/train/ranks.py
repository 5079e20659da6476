"""Rank vectors of a head on texts of its target: the input of every acceptance estimate.

The head is unrolled over the true tokens (:mod:`speccompile.train.unroll`), and each true next token gets its
rank among the candidates that the runtime would offer there (:mod:`speccompile.ops.draft`): by logit for
greedy texts, by logit / temperature + shared noise for texts sampled with a known seed.
Legend: B sequences, T positions with a feature, D draft depths, U draft vocabulary, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.model.eagle import EagleHead
from speccompile.ops.draft import draft_scores
from speccompile.train.batches import Batch
from speccompile.train.unroll import unroll
from speccompile.tree.replay import NOT_DRAFTED, RankTable

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class SamplingLaw:
    """How each sequence was drawn: ``temperature`` f32 [B] (0 greedy) and ``seed`` i64 [B]."""

    temperature: Tensor
    seed: Tensor


def greedy_law(sequences: int) -> SamplingLaw:
    return SamplingLaw(torch.zeros(sequences), torch.zeros(sequences, dtype=torch.int64))


@torch.no_grad()
def rank_sequences(
    head: EagleHead, token_ids: Tensor, batch: Batch, depth: int, width: int, law: SamplingLaw | None = None
) -> list[RankTable]:
    """The table of each sequence.  ``token_ids`` i64 [U]; ranks from ``width`` on count as not drafted.

    A round can start wherever a supervised token follows a supervised one: the first token of an answer
    comes out of the prompt's call.  ``law`` None: all sequences are greedy.
    """
    law = law or greedy_law(len(batch.token))
    device = batch.token.device
    token_ids = token_ids.to(device)
    label = batch.supervised & (torch.arange(batch.token.shape[1], device=device) <= batch.length[:, None])
    alive = label[:, 1:-1] & label[:, 2:]  # column i: the root is token i + 1, the first draft token i + 2
    starts = alive
    rank = torch.full((*alive.shape, depth), NOT_DRAFTED, dtype=torch.uint8, device=device)
    feature = batch.feature.to(head.embed_tokens.weight.dtype)
    drafted = F.pad(starts, (0, 1))  # nothing follows the last token
    steps = unroll(head, batch.token, feature, depth if starts.any() else 1, drafted)
    for step, (_, scored) in enumerate(steps):
        if step:
            columns = max(0, label.shape[1] - 2 - step)
            reached = rank[:, :columns, step - 1] < NOT_DRAFTED
            alive = alive[:, :columns] & reached & label[:, 2 + step :]
        b, i = alive.nonzero(as_tuple=True)
        for part in torch.arange(len(b), device=device).split(_ROWS_AT_ONCE):
            row, column = b[part], i[part]
            position = column + 2 + step
            logits = head.lm_head(scored[row, column]).float()
            noise = SamplingLaw(law.temperature.to(device)[row], law.seed.to(device)[row])
            found = token_ranks(logits, token_ids, batch.token[row, position], position, noise)
            rank[row, column, step] = found.where(found < width, NOT_DRAFTED).to(torch.uint8)
    return _tables(rank, starts, label)


def token_ranks(
    logits_NU: Tensor, token_ids_U: Tensor, token_N: Tensor, position_N: Tensor, law: SamplingLaw
) -> Tensor:
    """Rank of ``token`` in the order of ``draft_topk``, i64 [N]; NOT_DRAFTED outside the draft vocabulary."""
    same_NU = token_ids_U == token_N[:, None]
    score_NU = logits_NU
    if law.temperature.any():
        score_NU = draft_scores(logits_NU, token_ids_U, law.seed, position_N, law.temperature)
    own_N1 = score_NU.masked_fill(~same_NU, -torch.inf).amax(1, keepdim=True)
    tie_NU = (score_NU == own_N1) & (token_ids_U < token_N[:, None])
    rank_N = ((score_NU > own_N1) | tie_NU).sum(1)
    return rank_N.where(same_NU.any(1), NOT_DRAFTED)


def _tables(rank_BTD: Tensor, starts_BT: Tensor, label: Tensor) -> list[RankTable]:
    left = torch.zeros(label.shape[0], label.shape[1] + 1, dtype=torch.int32, device=label.device)
    for column in range(label.shape[1] - 1, -1, -1):  # labels from this token on, without a gap
        left[:, column] = (left[:, column + 1] + 1) * label[:, column]
    rank, starts, after = rank_BTD.cpu().numpy(), starts_BT.cpu().numpy(), left[:, 2:-1].cpu().numpy()
    root = np.arange(1, starts.shape[1] + 1, dtype=np.int32)
    return [RankTable(rank[b, chosen], after[b, chosen], root[chosen]) for b, chosen in enumerate(starts)]
