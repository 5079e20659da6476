"""Writes a trained head as a checkpoint folder in the SafeAILab EAGLE-1 layout.

``config.json`` describes the head's own sizes and the rope it was trained with; ``model.safetensors`` holds
``fc`` and ``layers.*`` with separate q/k/v and gate/up projections.  The embedding and the ``lm_head`` are
the target's and are not stored.  A reduced draft vocabulary is our extension of the layout: ``d2t`` offsets
(target id = draft id + d2t) that select rows of the target's ``lm_head``, and ``draft_vocab_size``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.model.eagle import EagleHead
from speccompile.model.load import source_names

_SHARED = ("embed_tokens.weight", "lm_head.weight")


def head_tensors(head: EagleHead, token_ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Checkpoint tensors by name; fused projections are split into the parts of the layout."""
    c = head.config
    qkv = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    tensors = {}
    for name, parameter in head.named_parameters():
        if name in _SHARED:
            continue
        names = source_names(name)
        sizes = {1: [len(parameter)], 2: [c.intermediate_size] * 2, 3: qkv}[len(names)]
        for part, rows in zip(names, parameter.detach().to(dtype).split(sizes), strict=True):
            tensors[part] = rows.clone()
    if c.draft_vocab_size != c.vocab_size:
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    return tensors


def head_config_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    """``config.json`` of the layout; ``bias`` says whether ``fc.bias`` exists."""
    rope: dict[str, Any] = {"rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        r = config.rope
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": r.factor,
            "low_freq_factor": r.low_freq_factor,
            "high_freq_factor": r.high_freq_factor,
            "original_max_position_embeddings": r.original_max_position_embeddings,
        }
    elif config.rope.kind == "linear":
        rope["rope_scaling"] = {"rope_type": "linear", "factor": config.rope.factor}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "bias": config.fc_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rms_norm_eps": config.rms_norm_eps,
        **rope,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def export_head(folder: Path, head: EagleHead, token_ids: Tensor, target: LlamaConfig) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (bf16), each atomically, weights first."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "model.safetensors", folder / "config.json"
    part = folder / "model.safetensors.part"
    save_file(head_tensors(head, token_ids, torch.bfloat16), part, {"format": "pt"})
    part.replace(weights)
    part = folder / "config.json.part"
    part.write_text(json.dumps(head_config_json(head.config, target), indent=2) + "\n", encoding="utf-8")
    part.replace(config)
