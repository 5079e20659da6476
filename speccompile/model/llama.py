"""The Llama 2 / 3.x target graph.

One forward serves prefill chunks, plain steps and tree verification; the rows' relations live in
the injected attention.  Legend as in :mod:`speccompile.model.layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import LlamaConfig
from speccompile.model.layers import Attend, DecoderLayer, RMSNorm
from speccompile.model.rotary import Rotary


class Llama(nn.Module):
    """Decoder-only Llama with separate access to hidden states, features and logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim)

    def forward(
        self, token: Tensor, position: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """``token``, ``position`` [...] -> post-norm hidden [..., h], feature [..., F].

        The feature is the concatenated input of ``aux_layers`` (EAGLE-3, arXiv 2503.01840, section
        3.1) or, when there are none, the post-norm hidden state (EAGLE-1, arXiv 2401.15077).
        """
        x = self.embed_tokens(token)
        cos_sin = self.rotary(position)
        taps = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                taps.append(x)
            x = layer(x, cos_sin, attend)
        hidden = self.norm(x)
        return hidden, torch.cat(taps, dim=-1) if taps else hidden
