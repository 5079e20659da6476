"""The head run over whole sequences, unrolled several draft steps: "training-time test".

Step 0 of column i reads the true pair (feature i, token i+1).  Step s reads the head's own output of step
s-1 in the same column with the true token i+1+s at position i+s, and attends to the true pairs 0..i and to
its own column's earlier steps: exactly what the runtime's head sees when it drafts s+1 tokens after
position i (EAGLE-3, arXiv 2503.01840, section 3).  Legend: B sequences, T columns, q / k heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speccompile.model.eagle import EagleHead


class UnrolledAttention:
    """Dense attention for all columns at once; ``attend`` of the shared layers."""

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor) -> Tensor:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        groups = q_BTqD.shape[2] // k_BTkD.shape[2]
        keys.append(k_BTkD.repeat_interleave(groups, dim=2))
        values.append(v_BTkD.repeat_interleave(groups, dim=2))
        scale = q_BTqD.shape[-1] ** -0.5
        q_BqTD, k_BqTD, v_BqTD = (x.transpose(1, 2) for x in (q_BTqD, keys[0], values[0]))
        columns = q_BTqD.shape[1]
        future = torch.ones(columns, columns, dtype=torch.bool, device=q_BTqD.device).triu(1)
        scores = [(q_BqTD @ k_BqTD.transpose(-1, -2)).masked_fill(future, -torch.inf)]
        scores += [(q_BTqD * k).sum(-1, keepdim=True).transpose(1, 2) for k in keys[1:]]
        weight = torch.softmax(torch.cat(scores, dim=-1).float() * scale, dim=-1).to(v_BTkD.dtype)
        mixed = (weight[..., :columns] @ v_BqTD).transpose(1, 2)
        for step, v in enumerate(values[1:]):
            mixed = mixed + weight[..., columns + step].transpose(1, 2).unsqueeze(-1) * v
        return mixed


def unroll(head: EagleHead, token: Tensor, feature: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``token`` [B, T + 1], ``feature`` [B, T, F] -> per step the fed-back and the scored hidden, [B, T, h].

    Column i of step s scores the distribution of token i+2+s; columns whose tokens lie beyond the
    sequence hold values that no loss reads.
    """
    columns = feature.shape[1]
    attend = UnrolledAttention()
    column = torch.arange(columns, device=token.device)
    hidden = head.fuse(feature)
    for step in range(steps):
        shifted = token[:, (column + 1 + step).clamp(max=columns)]
        hidden, scored = head(shifted, hidden, column + step, attend)
        yield hidden, scored
