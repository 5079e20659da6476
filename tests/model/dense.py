"""Dense causal attention as an ``attend`` callable: the independent oracle of the model tests."""

import torch
from torch import Tensor


def dense_causal_attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, q_heads, D], k and v [T, kv_heads, D]; plain masked softmax in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("thd,shd->hts", q.double(), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)
