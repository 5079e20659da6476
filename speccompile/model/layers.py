"""Building blocks shared by the target and the draft heads.

Attention itself is injected: a layer hands rotated queries, keys and values to an ``attend``
callable and gets the mixed values back.  The runtime programs pass paged tree attention; whoever runs whole
texts passes :func:`causal_attend`.  The weights and the arithmetic around it are the same code.

Legend: ... any leading dimensions (rows of a program, or batch and sequence in training), h hidden
size, q / k heads of the queries / keys, D head size, i intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.model.rotary import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [..., q, D], k [..., k, D], v [..., k, D]) -> [..., q, D]``."""


def causal_attend(_layer: int, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor) -> Tensor:
    """Dense attention over whole texts (B texts, T positions): each sees itself and those before it."""
    q_BqTD, k_BkTD, v_BkTD = (x.transpose(1, 2) for x in (q_BTqD, k_BTkD, v_BTkD))
    mixed_BqTD = F.scaled_dot_product_attention(q_BqTD, k_BkTD, v_BkTD, is_causal=True, enable_gqa=True)
    return mixed_BqTD.transpose(1, 2)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention with fused q/k/v projection; ``input_size`` may exceed ``h`` (EAGLE-3)."""

    def __init__(self, config: LlamaConfig | HeadConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        rows = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(input_size, rows, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.q_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.q_heads, self.kv_heads, self.kv_heads), dim=-2)
        mixed = attend(self.layer, rotate(q, cos_sin), rotate(k, cos_sin), v.contiguous())
        return self.o_proj(mixed.flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward with fused gate and up projections."""

    def __init__(self, config: LlamaConfig | HeadConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm Llama layer.  ``input_norm=False`` is EAGLE-1's first layer, which has none."""

    def __init__(self, config: LlamaConfig | HeadConfig, layer: int, *, input_norm: bool = True) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(h, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, layer, h)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
