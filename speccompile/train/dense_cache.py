"""A dense KV cache for generating many sequences with the target graph, without a compiled engine.

Rows of a batch are right-padded; a row writes at its own positions and sees every slot up to its position,
so padding is overwritten by real tokens before anything can attend to it.
Legend: B sequences, T tokens of the call, L slots, q / k heads, D head size, h hidden size, A taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.model.llama import Llama


class DenseCache:
    """Keys, values and the features of every position so far."""

    def __init__(self, model: Llama, sequences: int, slots: int, aux_layers: tuple[int, ...]) -> None:
        c, dtype = model.config, model.embed_tokens.weight.dtype
        shape = (sequences, c.num_key_value_heads, slots, c.head_dim)
        self.model, self.aux_layers = model, aux_layers
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(c.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(c.num_hidden_layers)]
        self.hidden = torch.zeros(sequences, slots, c.hidden_size, dtype=dtype)
        self.aux = torch.zeros(sequences, slots, c.hidden_size * len(aux_layers), dtype=dtype)

    def keep(self, rows: Tensor) -> None:
        """Drops all sequences but ``rows`` (i64)."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]
        self.hidden, self.aux = self.hidden[rows], self.aux[rows]

    @torch.no_grad()
    def forward(self, token_BT: Tensor, position_BT: Tensor, first: int = 0) -> Tensor:
        """Runs sequences ``first .. first + B`` and stores their features; returns the hidden [B, T, h]."""
        rows = torch.arange(first, first + len(token_BT))[:, None]
        slots = int(position_BT.max()) + 1
        visible_B1TL = (torch.arange(slots) <= position_BT[:, :, None])[:, None]

        def attend(layer: int, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[rows, :, position_BT] = k_BTkD
            values[rows, :, position_BT] = v_BTkD
            part = slice(first, first + len(token_BT))
            return _grouped_attention(q_BTqD, keys[part, :, :slots], values[part, :, :slots], visible_B1TL)

        hidden, feature = self.model(token_BT, position_BT, attend, self.aux_layers)
        self.hidden[rows, position_BT] = hidden
        if self.aux_layers:
            self.aux[rows, position_BT] = feature
        return hidden


def _grouped_attention(q_BTqD: Tensor, k_BkLD: Tensor, v_BkLD: Tensor, visible_B1TL: Tensor) -> Tensor:
    """Query heads of one KV head are folded into the T dimension, so keys are not copied per query head."""
    batch, length, heads, size = q_BTqD.shape
    kv_heads = k_BkLD.shape[1]
    groups = heads // kv_heads
    q = q_BTqD.view(batch, length, kv_heads, groups, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(q, k_BkLD, v_BkLD, attn_mask=visible_B1TL.repeat(1, 1, groups, 1))
    return mixed.view(batch, kv_heads, groups, length, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
