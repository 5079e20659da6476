"""``draw_tokens``: one seeded draw per row by Gumbel-max, after the sampling filters.

Legend: N rows, V vocabulary.  ``logits`` f32 [N, V]; ``seed``, ``position`` (absolute position of
the token to draw), ``top_k`` (0 off) i64 [N]; ``temperature``, ``top_p`` (>= 1 off), ``min_p``
(0 off) f32 [N].  Returns token ids i64 [N].

Temperature 0 is the plain argmax, ties to the lowest id.  Otherwise l = logits / temperature is
filtered in the order of Hugging Face ``generate`` (top-k, top-p, min-p; temperature came first) and
the draw is the argmax of l + g(seed, position, id) over the ids kept.  One rule differs from
Hugging Face: ids whose l ties at the top-k threshold are kept lowest id first, so that exactly k
remain.  The best id is always kept.  Scores are float64: nothing overflows at tiny temperatures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccompile.ops.noise import gumbel_noise
from speccompile.ops.registry import register

SCHEMA = (
    "draw_tokens(Tensor logits, Tensor seed, Tensor position, Tensor temperature, Tensor top_k, "
    "Tensor top_p, Tensor min_p) -> Tensor"
)


def kept_tokens(l_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Which ids survive the filters, bool [N, V]; ``l_NV`` are logits over temperature, f64."""
    sorted_NV, id_NV = torch.sort(l_NV, dim=1, descending=True, stable=True)
    rank_V = torch.arange(l_NV.shape[1], device=l_NV.device)
    k_N1 = torch.where(top_k_N > 0, top_k_N, l_NV.shape[1])[:, None]
    keep_NV = rank_V < k_N1
    weight_NV = torch.exp(sorted_NV - sorted_NV[:, :1]).where(keep_NV, 0.0)
    mass_above_NV = weight_NV.cumsum(1) - weight_NV
    p_N1 = top_p_N.double()[:, None]
    keep_NV &= (p_N1 >= 1) | (mass_above_NV < p_N1 * weight_NV.sum(1, keepdim=True))
    keep_NV &= weight_NV >= min_p_N.double()[:, None]
    keep_NV |= rank_V == 0
    return torch.zeros_like(keep_NV).scatter(1, id_NV, keep_NV)


def reference(
    logits_NV: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
) -> Tensor:
    greedy_N = temperature_N == 0
    l_NV = logits_NV.double() / temperature_N.double().where(~greedy_N, 1.0)[:, None]
    id_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    score_NV = l_NV + gumbel_noise(seed_N[:, None], position_N[:, None], id_V)
    keep_NV = kept_tokens(l_NV, top_k_N, top_p_N, min_p_N)
    drawn_N = score_NV.where(keep_NV, float("-inf")).argmax(1)
    return torch.where(greedy_N, logits_NV.argmax(1), drawn_N)


def fake(logits_NV: Tensor, *_: Tensor) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape[0], dtype=torch.int64)


draw_tokens = register(SCHEMA, reference, fake)
