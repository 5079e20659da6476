"""The head run over whole sequences, unrolled several draft steps: "training-time test".

Step 0 of column i reads the true pair (feature i, token i+1).  Step s reads the head's own output of step
s-1 in the same column with the true token i+1+s at position i+s, and attends to the true pairs 0..i and to
its own column's earlier steps: exactly what the runtime's head sees when it drafts s+1 tokens after
position i (EAGLE-3, arXiv 2503.01840, section 3).
Legend: B sequences, T columns, q / k heads of queries / keys, g queries per key head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speccompile.model.eagle import EagleHead


class UnrolledAttention:
    """Dense attention for all columns at once; ``attend`` of the shared layers."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._future_TT = torch.ones(columns, columns, dtype=torch.bool, device=device).triu(1)
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor) -> Tensor:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k_BTkD)
        values.append(v_BTkD)
        columns, key_heads = k_BTkD.shape[1:3]
        q_BTkgD = q_BTqD.unflatten(2, (key_heads, -1)) * q_BTqD.shape[-1] ** -0.5
        q_BkgTD, k_BkTD, v_BkTD = (
            q_BTkgD.permute(0, 2, 3, 1, 4),
            keys[0].transpose(1, 2),
            values[0].transpose(1, 2),
        )
        scores = (q_BkgTD.flatten(2, 3) @ k_BkTD.transpose(-1, -2)).unflatten(2, (-1, columns))
        parts = [scores.masked_fill(self._future_TT, -torch.inf)]
        parts += [(q_BTkgD * k.unsqueeze(3)).sum(-1, keepdim=True).permute(0, 2, 3, 1, 4) for k in keys[1:]]
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        weight = torch.softmax(joined.float(), dim=-1).to(v_BTkD.dtype)
        mixed = (
            (weight[..., :columns].flatten(2, 3) @ v_BkTD).unflatten(2, (-1, columns)).permute(0, 3, 1, 2, 4)
        )
        for step, v in enumerate(values[1:]):
            mixed = mixed + weight[..., columns + step].permute(0, 3, 1, 2).unsqueeze(-1) * v.unsqueeze(3)
        return mixed.flatten(2, 3)


def unroll(head: EagleHead, token: Tensor, feature: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``token`` [B, T + 1], ``feature`` [B, T, F] -> per step the fed-back and the scored hidden, [B, T, h].

    Column i of step s scores the distribution of token i+2+s; columns whose tokens lie beyond the
    sequence hold values that no loss reads.
    """
    columns = feature.shape[1]
    attend = UnrolledAttention(columns, token.device)
    column = torch.arange(columns, device=token.device)
    hidden = head.fuse(feature)
    for step in range(steps):
        shifted = token[:, (column + 1 + step).clamp(max=columns)]
        hidden, scored = head(shifted, hidden, column + step, attend)
        yield hidden, scored
