"""The head run over whole sequences, unrolled several draft steps: "training-time test".

Step 0 of column i reads the true pair (feature i, token i+1).  Step s reads the head's own output of step
s-1 in the same column with the true token i+1+s at position i+s, and attends to the true pairs 0..i and to
its own column's earlier steps: exactly what the runtime's head sees when it drafts s+1 tokens after
position i (EAGLE-3, arXiv 2503.01840, section 3).
Legend: B sequences, T columns, N drafted columns (of all sequences, end to end), W most drafted columns of a
sequence, q / k heads of queries / keys, g queries per key head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.model.eagle import EagleHead

_SHORT = 384


class UnrolledAttention:
    """``attend`` of the shared layers for all columns at once.

    The first call of a layer is step 0, over [B, T]; later calls are over the N drafted columns.
    """

    def __init__(self, drafted_BT: Tensor) -> None:
        count_B = drafted_BT.sum(1)
        self.sequence_N, self.column_N = drafted_BT.nonzero(as_tuple=True)
        self._slot_N = drafted_BT.cumsum(1)[self.sequence_N, self.column_N] - 1
        self._grid = (len(count_B), int(count_B.max()))
        self._position_T = torch.arange(drafted_BT.shape[1], device=drafted_BT.device)
        self._hidden_B11WT = (self._position_T > self._spread(self.column_N)[..., None])[:, None, None]
        self._true: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _spread(self, x_N: Tensor) -> Tensor:
        """[N, ...] -> [B, W, ...], zero where a sequence has fewer than W."""
        return x_N.new_zeros(*self._grid, *x_N.shape[1:]).index_put((self.sequence_N, self._slot_N), x_N)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer not in self._true:
            self._true[layer] = (k.transpose(1, 2), v.transpose(1, 2))
            return self._first(q, *self._true[layer])
        q_BWqD, k_BWkD, v_BWkD = (self._spread(x) for x in (q, k, v))
        self._own.setdefault(layer, []).append((k_BWkD.unsqueeze(3), v_BWkD.unsqueeze(3)))
        mixed_BWqD = _mix(q_BWqD, *self._true[layer], self._hidden_B11WT, self._own[layer])
        return mixed_BWqD[self.sequence_N, self._slot_N]

    def _first(self, q_BTqD: Tensor, k_BkTD: Tensor, v_BkTD: Tensor) -> Tensor:
        """Causal attention.  The fused kernel's backward is slow for short sequences on CPUs."""
        if q_BTqD.device.type == "cpu" and q_BTqD.shape[1] <= _SHORT:
            return _mix(q_BTqD, k_BkTD, v_BkTD, self._position_T > self._position_T[:, None], [])
        groups = q_BTqD.shape[2] // k_BkTD.shape[1]
        k_BqTD, v_BqTD = (x.repeat_interleave(groups, dim=1) for x in (k_BkTD, v_BkTD))
        q_BqTD = q_BTqD.transpose(1, 2)
        return F.scaled_dot_product_attention(q_BqTD, k_BqTD, v_BqTD, is_causal=True).transpose(1, 2)


def _mix(
    q_BWqD: Tensor, k_BkTD: Tensor, v_BkTD: Tensor, hidden_WT: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """One softmax over the true pairs that are not hidden and over the column's own earlier steps.

    ``own`` holds keys and values [B, W, k, 1, D]; returns [B, W, q, D].
    """
    pairs = k_BkTD.shape[2]
    q_BWkgD = q_BWqD.unflatten(2, (k_BkTD.shape[1], -1)) * q_BWqD.shape[-1] ** -0.5
    q_BkgWD = q_BWkgD.permute(0, 2, 3, 1, 4)
    gW = q_BkgWD.shape[2:4]
    true = (q_BkgWD.flatten(2, 3) @ k_BkTD.transpose(-1, -2)).unflatten(2, gW)
    scores = [true.masked_fill(hidden_WT, -torch.inf)]
    scores += [(q_BWkgD * k).sum(-1, keepdim=True).permute(0, 2, 3, 1, 4) for k, _ in own]
    joined = torch.cat(scores, dim=-1) if own else scores[0]
    weight = torch.softmax(joined.float(), dim=-1).to(v_BkTD.dtype)
    mixed = (weight[..., :pairs].flatten(2, 3) @ v_BkTD).unflatten(2, gW).permute(0, 3, 1, 2, 4)
    for step, (_, v) in enumerate(own):
        mixed = mixed + weight[..., pairs + step].permute(0, 3, 1, 2).unsqueeze(-1) * v
    return mixed.flatten(2, 3)


def unroll(
    head: EagleHead, token: Tensor, feature: Tensor, steps: int, drafted: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """``token`` [B, T + 1], ``feature`` [B, T, F] -> per step the fed-back and the scored hidden, [B, T, h].

    Column i of step s scores the distribution of token i+2+s; columns whose tokens lie beyond the
    sequence hold values that no loss reads.  ``drafted`` bool [B, T] limits the steps after the first to the
    columns that matter; the others hold zeros there.
    """
    columns = feature.shape[1]
    if drafted is None:
        drafted = torch.ones(token.shape[0], columns, dtype=torch.bool, device=token.device)
    attend = UnrolledAttention(drafted)
    column = torch.arange(columns, device=token.device)
    hidden, scored = head(token[:, 1:], head.fuse(feature), column, attend)
    yield hidden, scored
    where = attend.sequence_N, attend.column_N
    hidden_Nh = hidden[where]
    for step in range(1, steps):
        shifted = token[where[0], (where[1] + 1 + step).clamp(max=columns)]
        hidden_Nh, scored_Nh = head(shifted, hidden_Nh, where[1] + step, attend)
        yield tuple(x.new_zeros(*hidden.shape).index_put(where, x) for x in (hidden_Nh, scored_Nh))
