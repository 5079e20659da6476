"""Losses on logits without holding the logits of all rows.

Rows are scored in blocks; a block's gradient is taken while its logits are in cache, and only the gradients
of the small inputs are kept.  This bounds memory for large vocabularies and is faster for small ones too.
Legend: S rows, U draft vocabulary, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BlockLoss = Callable[[Tensor, slice], Tensor]
"""Float32 logits of a block of rows and which rows they are -> the sum of their losses."""

_BLOCK_LOGITS = 2**20


def row_blocks(rows: int, width: int) -> list[slice]:
    """Cuts ``rows`` so that a block of ``width`` columns stays near the size of a CPU cache."""
    size = max(1, _BLOCK_LOGITS // width)
    return [slice(start, min(rows, start + size)) for start in range(0, rows, size)]


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scored_Sh: Tensor, weight_Uh: Tensor, loss: BlockLoss) -> Tensor:
        needs_scored, needs_weight = ctx.needs_input_grad[:2]
        weight = weight_Uh.detach().to(scored_Sh.dtype).requires_grad_(needs_weight)
        grad_scored = torch.empty_like(scored_Sh) if needs_scored else None
        grad_weight = torch.zeros_like(weight_Uh) if needs_weight else None
        total = scored_Sh.new_zeros((), dtype=torch.float32)
        for block in row_blocks(len(scored_Sh), len(weight_Uh)):
            rows = scored_Sh[block].detach().requires_grad_(needs_scored)
            with torch.set_grad_enabled(needs_scored or needs_weight):
                value = loss((rows @ weight.T).float(), block)
            total += value.detach()
            inputs = [x for x in (rows, weight) if x.requires_grad]
            grads = (
                dict(zip(map(id, inputs), torch.autograd.grad(value, inputs), strict=True)) if inputs else {}
            )
            if grad_scored is not None:
                grad_scored[block] = grads[id(rows)]
            if grad_weight is not None:
                grad_weight += grads[id(weight)]
        ctx.save_for_backward(grad_scored, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        scored, weight = ctx.saved_tensors
        scale = grad.to(scored.dtype) if scored is not None else grad
        return (None if scored is None else scored * scale, None if weight is None else weight * grad, None)


def blockwise_loss(scored_Sh: Tensor, weight_Uh: Tensor, loss: BlockLoss) -> Tensor:
    """Sum over rows of ``loss`` of the logits ``scored @ weight.T``, differentiable in both tensors.

    The product is taken in the dtype of ``scored_Sh``.
    """
    return _BlockwiseLoss.apply(scored_Sh, weight_Uh, loss)
