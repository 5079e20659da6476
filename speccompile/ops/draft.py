"""``draft_topk``: the candidates a draft row offers, ranked under the target's own noise.

Legend: N rows, U draft vocabulary, k candidates.  ``logits`` f32 [N, U]; ``token_ids`` i64 [U], the
target id of each draft id (distinct); ``seed`` and ``position`` (of the token the candidates stand
for) i64 [N]; ``temperature`` f32 [N].  Returns target ids i64 [N, k], best first, ties to the
lowest target id.  The score is logits / temperature + g(seed, position, target id), or the logits
alone at temperature 0.  Sharing the noise of :mod:`speccompile.ops.drawing` makes head and target
agree more often (arXiv 2408.07978); the output law is the target's whatever is offered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccompile.ops.noise import gumbel_noise
from speccompile.ops.registry import register

SCHEMA = (
    "draft_topk(Tensor logits, Tensor token_ids, Tensor seed, Tensor position, Tensor temperature, "
    "int k) -> Tensor"
)


def draft_scores(
    logits_NU: Tensor, token_ids_U: Tensor, seed_N: Tensor, position_N: Tensor, temperature_N: Tensor
) -> Tensor:
    """What candidates are ranked by, f64 [N, U]."""
    greedy_N1 = (temperature_N == 0)[:, None]
    l_NU = logits_NU.double() / temperature_N.double()[:, None].where(~greedy_N1, 1.0)
    noise_NU = gumbel_noise(seed_N[:, None], position_N[:, None], token_ids_U)
    return l_NU + noise_NU.where(~greedy_N1, 0.0)


def reference(
    logits_NU: Tensor, token_ids_U: Tensor, seed_N: Tensor, position_N: Tensor, temperature_N: Tensor, k: int
) -> Tensor:
    id_U, order_U = torch.sort(token_ids_U)
    score_NU = draft_scores(logits_NU[:, order_U], id_U, seed_N, position_N, temperature_N)
    return id_U[torch.sort(score_NU, dim=1, descending=True, stable=True).indices[:, :k]]


def fake(
    logits_NU: Tensor, token_ids_U: Tensor, seed_N: Tensor, position_N: Tensor, temperature_N: Tensor, k: int
) -> Tensor:
    del token_ids_U, seed_N, position_N, temperature_N
    return logits_NU.new_empty((logits_NU.shape[0], k), dtype=torch.int64)


draft_topk = register(SCHEMA, reference, fake)
