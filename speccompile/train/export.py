"""Writes a trained head as a checkpoint folder in a public format.

``config.json`` describes the head's own sizes and the rope it was trained with; ``model.safetensors`` holds
the weights in bfloat16, with separate q/k/v and gate/up projections.  The formats differ in names and in
where the config says things; :mod:`speccompile.checkpoint.head_formats` reads all of them back.  Target ids
ascend with draft ids, and ``d2t`` holds target id - draft id.  An EAGLE-1 head with a reduced draft
vocabulary and no ``lm_head`` of its own is our extension of the SafeAILab layout: ``d2t`` selects rows of
the target's.  So are the norms of ``layer_norms``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.checkpoint.head_formats.safeailab import LAYER_NORMS
from speccompile.checkpoint.hf_export import hf_config_json
from speccompile.errors import ConfigError
from speccompile.model.eagle import EagleHead
from speccompile.model.load import source_names
from speccompile.train.files import write_atomically

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
DEFAULT_FORMAT = "safeailab"


def head_tensors(head: EagleHead, token_ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Checkpoint tensors by canonical name; fused projections are split into the parts of the layout."""
    c = head.config
    qkv = [n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    shared = {"embed_tokens.weight": not c.own_embedding, "lm_head.weight": not c.own_lm_head}
    tensors = {}
    for name, parameter in head.named_parameters():
        if shared.get(name):
            continue
        names = source_names(name)
        sizes = {1: [len(parameter)], 2: [c.intermediate_size] * 2, 3: qkv}[len(names)]
        for part, rows in zip(names, parameter.detach().to("cpu", dtype).split(sizes), strict=True):
            tensors[part] = rows.clone()
    if c.draft_vocab_size != c.vocab_size:
        ids = token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        if c.kind == "eagle3":
            tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def llama_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    """The plain Llama fields of the head, with its own rope; position count and token ids are the
    target's."""
    own = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )
    return hf_config_json(own, torch.bfloat16)


def _safeailab_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    """``bias`` speaks of ``fc`` (EAGLE-1); aux layers at the top level are inputs of layers, as SafeAILab
    counts."""
    data = llama_json(config, target) | {"draft_vocab_size": config.draft_vocab_size}
    if config.kind == "eagle1":
        norms = {LAYER_NORMS: True} if config.first_input_norm else {}
        return data | {"bias": config.fc_bias} | norms
    data |= {"architectures": ["LlamaForCausalLMEagle3"], _AUX_KEY: list(config.aux_layers)}
    return data | _flags(config)


def _specforge_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    data = llama_json(config, target) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {_AUX_KEY: _outputs(config), "use_aux_hidden_state": True},
    }
    return data | _flags(config)


def _modelopt_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    nested = {
        _AUX_KEY: _outputs(config),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "norm_before_fc": config.fc_input_norm,
        "return_hidden_post_norm": config.norm_feedback,
    }
    return _specforge_json(config, target) | {"eagle_config": nested}


def _speculators_json(config: HeadConfig, target: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _AUX_KEY: list(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fc_input_norm,
        "norm_output": config.norm_feedback,
        "fc_norm": config.fc_norm,
        "transformer_layer_config": llama_json(config, target),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "default_proposal_method": "greedy",
        },
    }


def _flags(config: HeadConfig) -> dict[str, Any]:
    """Optional parts of an EAGLE-3 head, named only where they differ from the layout's defaults."""
    flags = {"norm_before_residual": config.norm_before_residual, "fc_norm": config.fc_norm}
    return {name: True for name, value in flags.items() if value}


def _outputs(config: HeadConfig) -> list[int]:
    """Aux layers counted as outputs of layers, as SpecForge and ModelOpt do."""
    return [layer - 1 for layer in config.aux_layers]


Describe = Callable[[HeadConfig, LlamaConfig], dict[str, Any]]
FORMATS: dict[str, tuple[tuple[str, ...], str, Describe]] = {
    "safeailab": (("eagle1", "eagle3"), "midlayer", _safeailab_json),
    "specforge": (("eagle3",), "midlayer", _specforge_json),
    "speculators": (("eagle3",), "layers.0", _speculators_json),
    "modelopt": (("eagle3",), "layers.0", _modelopt_json),
}
"""By name: the kinds of head a format has, what it calls the first EAGLE-3 layer, and its ``config.json``."""


def check_format(name: str, config: HeadConfig) -> None:
    """ConfigError when the format is unknown or cannot say what the head is."""
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: must be one of {', '.join(FORMATS)}")
    if config.kind not in FORMATS[name][0]:
        raise ConfigError(f"--format {name}: holds EAGLE-3 heads only; use --format safeailab")
    if name in ("specforge", "modelopt") and config.aux_layers and config.aux_layers[0] == 0:
        raise ConfigError(
            f"--format {name}: cannot say 'input of layer 0' (aux_layers); use --format safeailab"
        )
    unsaid = config.fc_input_norm or (config.norm_feedback and config.kind == "eagle3")
    if name in ("safeailab", "specforge") and unsaid:
        raise ConfigError(
            f"--format {name}: cannot say norm_feedback or fc_input_norm; use --format speculators"
        )


def export_head(
    folder: Path, head: EagleHead, token_ids: Tensor, target: LlamaConfig, format_name: str = DEFAULT_FORMAT
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (bf16), each atomically, weights first."""
    check_format(format_name, head.config)
    _, first_layer, describe = FORMATS[format_name]
    tensors = head_tensors(head, token_ids, torch.bfloat16)
    if head.config.kind == "eagle3":
        tensors = {n.replace("layers.0.", f"{first_layer}.", 1): t for n, t in tensors.items()}
    if format_name == "modelopt":  # that layout has no t2d
        tensors.pop("t2d", None)
    text = json.dumps(describe(head.config, target), indent=2) + "\n"
    write_atomically(folder / "model.safetensors", lambda file: file.write(save(tensors, {"format": "pt"})))
    write_atomically(folder / "config.json", lambda file: file.write(text.encode()))
