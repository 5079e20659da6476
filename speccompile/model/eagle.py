"""EAGLE-1/2 and EAGLE-3 draft heads as one module.

A head turns a pair (embedding of token i+1, hidden for position i) into a hidden for position i+1.
``fuse`` maps target features to that hidden once; later draft steps feed the head its own output.
Sources: EAGLE (arXiv 2401.15077, section 3), EAGLE-3 (arXiv 2503.01840, section 3).
Legend as in :mod:`speccompile.model.layers`; U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import HeadConfig
from speccompile.model.layers import MLP, Attend, Attention, DecoderLayer, RMSNorm
from speccompile.model.rotary import Rotary


class Eagle3FirstLayer(nn.Module):
    """First EAGLE-3 layer: attention reads the normed embedding and the normed hidden side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(h, eps)
        self.hidden_norm = RMSNorm(h, eps)
        self.self_attn = Attention(config, 0, 2 * h)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(config)

    def forward(
        self, embedding: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        x = residual + self.self_attn(joined, cos_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """A draft head of either kind, 1 or more layers."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        h, eps, features = config.hidden_size, config.rms_norm_eps, config.feature_size
        eagle3 = config.kind == "eagle3"
        parts = max(1, len(config.aux_layers))
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps) for _ in range(parts if config.fc_norm else 0)
        )
        self.input_norm = RMSNorm(features, eps) if config.fc_input_norm else nn.Identity()
        fc_in = features if eagle3 else 2 * h
        self.fc = nn.Linear(fc_in, h, bias=config.fc_bias) if config.has_fc else nn.Identity()
        normed = config.first_input_norm
        first = Eagle3FirstLayer(config) if eagle3 else DecoderLayer(config, 0, input_norm=normed)
        rest = [DecoderLayer(config, i) for i in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *rest])
        self.norm = RMSNorm(h, eps) if config.final_norm else nn.Identity()
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim)

    def fuse(self, feature: Tensor) -> Tensor:
        """Target feature [..., F] -> hidden [..., h]; the identity for EAGLE-1."""
        if self.config.kind == "eagle1":
            return feature
        if self.fc_norm:
            parts = feature.chunk(len(self.fc_norm), dim=-1)
            feature = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(feature))

    def forward(
        self, token: Tensor, hidden: Tensor, position: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """``token`` [...] (token i+1), ``hidden`` [..., h] (position i), ``position`` [...] = i.

        Returns the hidden fed to the next draft step and the hidden that ``lm_head`` scores.
        """
        embedding = self.embed_tokens(token)
        cos_sin = self.rotary(position)
        first, *rest = self.layers
        if self.config.kind == "eagle3":
            x = first(embedding, hidden, cos_sin, attend)
        else:
            x = first(self.fc(torch.cat((embedding, hidden), dim=-1)), cos_sin, attend)
        for layer in rest:
            x = layer(x, cos_sin, attend)
        normed = self.norm(x)
        return (normed if self.config.norm_feedback else x), normed
