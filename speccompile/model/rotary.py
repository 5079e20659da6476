"""Rotary position embedding, rotate-half form, with the frequency laws that Llama and EAGLE files use.

Owns the inverse frequencies (:func:`inverse_frequencies`) and their application
(:class:`Rotary`).  Angles are computed from integer positions in float32 inside the program, so no
table bounds the sequence length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import RopeConfig
from speccompile.errors import CheckpointError


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1 law: long wavelengths are divided by ``factor``, short ones kept, a blend between."""
    wavelength = 2 * math.pi / inv_freq
    original = rope.original_max_position_embeddings
    low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def _yarn(inv_freq: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate low frequencies, keep high ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        wave = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin (1 except for YaRN)."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "default":
        return inv_freq, 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        attention = rope.attention_factor
        if attention is None:
            attention = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return _yarn(inv_freq, rope, head_dim), attention
    raise CheckpointError(f"rope kind {rope.kind!r} is not supported (known: default, linear, llama3, yarn)")


class Rotary(nn.Module):
    """Cosines and sines of integer positions, and their application to heads."""

    inv_freq: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.scale = inverse_frequencies(rope, head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """``position`` [...] i64 -> cos, sin float32 [..., 1, head_dim / 2] (broadcast over heads)."""
        angle = position[..., None, None].float() * self.inv_freq
        return angle.cos() * self.scale, angle.sin() * self.scale


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``x`` [..., heads, head_dim] in float32; the dtype of ``x`` is kept."""
    cos, sin = cos_sin
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
