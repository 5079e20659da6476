"""Writes a target as a Hugging Face folder that transformers 4 and 5 load.

The demo turns the GGUF of its model into ``target/`` with it.  The whole model is held in memory once, in the
chosen dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.checkpoint.target import Target


def export_hf(target: Target, dest: Path, dtype: torch.dtype) -> None:
    """Writes ``model.safetensors`` in ``dtype``, tokenizer files and, last, ``config.json`` into ``dest``."""
    dest.mkdir(parents=True, exist_ok=True)
    (dest / "config.json").unlink(missing_ok=True)
    tensors = {name: target.tensor(name, dtype).contiguous() for name in target.expected_shapes}
    save_file(tensors, dest / "model.safetensors", metadata={"format": "pt"})
    target.tokenizer.write(dest)
    text = json.dumps(hf_config_json(target.config, dtype), indent=2)
    (dest / "config.json").write_text(text + "\n", encoding="utf-8")


def hf_config_json(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of a target, with the rope written in the form of transformers 4, which 5 reads."""
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    fields = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.kind]}
    return {"rope_type": rope.kind, **{k: v for k, v in fields.items() if v is not None}}
