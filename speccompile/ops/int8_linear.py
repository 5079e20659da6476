"""``int8_linear``: 8-bit weights times rows that are quantized as they come.

Legend: T rows, N outputs, K inputs.  ``x`` [T, K] bf16, fp16 or fp32 -> f32 [T, N].  Weights are 8-bit
integers with one scale per output (:func:`quantize_weight`, :func:`pack_weight`); each row of ``x`` gets the
scale largest / 127, both symmetric and within [-127, 127].  Sums are exact integers, so the result of a row
depends, bit for bit, on that row alone.

A row whose largest magnitude is below 2**-100 gives zeros; a row with a NaN or an infinity gives NaN in every
column.  A bias is the caller's to add.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.ops.registry import register

SCHEMA = "int8_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor"
PANEL = 32  # outputs whose weights lie together, kPanel of the kernel
_SMALLEST_ROW = 2.0**-100


def _integers(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as f32 integers in [-127, 127] and their f32 scales [R, 1]."""
    x_RK = x_RK.float()
    largest_R1 = x_RK.abs().amax(1, keepdim=True)
    usable_R1 = largest_R1.isfinite() & (largest_R1 >= _SMALLEST_ROW)
    inverse_R1 = largest_R1.new_tensor(127.0) / largest_R1  # `127 / tensor` would round twice
    q_RK = torch.where(usable_R1, x_RK * inverse_R1, 0.0).round()
    scale_R1 = torch.where(usable_R1, largest_R1 / 127, torch.where(largest_R1.isfinite(), 0.0, torch.nan))
    return q_RK, scale_R1


def quantize_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest 8-bit integers [N, K] and the scale of each output, f32 [N]; ``weight`` must be finite."""
    q_NK, scale_N1 = _integers(weight_NK)
    return q_NK.to(torch.int8), scale_N1[:, 0]


def pack_weight(weight_NK: Tensor) -> Tensor:
    """i8 [N, K] in the kernel's order [panels, ceil(K / 4), PANEL, 4], padded with zeros."""
    outputs, inputs = weight_NK.shape
    padded = F.pad(weight_NK, (0, -inputs % 4, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()


def unpack_weight(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Inverse of :func:`pack_weight`."""
    return packed.transpose(1, 2).flatten(0, 1).flatten(1)[:outputs, :inputs]


def reference(x_TK: Tensor, weight: Tensor, scale_N: Tensor) -> Tensor:
    q_TK, scale_T1 = _integers(x_TK)
    weight_NK = unpack_weight(weight, scale_N.numel(), x_TK.shape[1])
    # Sums below 2**53 are exact in float64, in any order.
    sum_TN = q_TK.double() @ weight_NK.double().T
    return sum_TN.float() * (scale_T1 * scale_N)


def fake(x_TK: Tensor, weight: Tensor, scale_N: Tensor) -> Tensor:
    del weight
    return x_TK.new_empty((x_TK.shape[0], scale_N.shape[0]), dtype=torch.float32)


int8_linear = register(SCHEMA, reference, fake)
