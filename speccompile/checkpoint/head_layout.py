"""Canonical tensor names of an EAGLE head, and the shape each must have.

Owns the one table (:func:`head_shapes`) that readers check files against and writers follow, and the mapping
of stored names onto it (:func:`canonical_name`).
"""

from __future__ import annotations

import re

from speccompile.checkpoint.config import HeadConfig

Shape = tuple[int, ...]

_IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^t2d$")
_FIRST_LAYER = re.compile(r"^(midlayer|transformer)\.")
_LATER_HIDDEN_NORM = re.compile(r"^(layers\.(?!0\.)\d+)\.hidden_norm\.weight$")


def canonical_name(stored: str) -> str | None:
    """Canonical name of a stored tensor; None for buffers that are not weights.

    ``midlayer.`` (SafeAILab 3, SpecForge) and ``transformer.`` (old speculators) are layer 0.  The norm
    before the attention of a later layer is ``input_layernorm``, also where the file calls it ``hidden_norm``
    (TensorRT-LLM and SGLang naming).
    """
    if _IGNORED.search(stored):
        return None
    name = _FIRST_LAYER.sub("layers.0.", stored)
    name = re.sub(r"^fusion_fc\.", "fc.", name)
    return _LATER_HIDDEN_NORM.sub(r"\1.input_layernorm.weight", name)


def head_shapes(config: HeadConfig) -> dict[str, Shape]:
    """Every tensor a head with this config owns, with its shape (linears are [out, in])."""
    h = config.hidden_size
    shapes: dict[str, Shape] = dict(_fusion_shapes(config))
    for layer in range(config.num_hidden_layers):
        shapes.update(_layer_shapes(config, layer))
    if config.final_norm:
        shapes["norm.weight"] = (h,)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, h)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, h)
    if config.draft_vocab_size < config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def _fusion_shapes(config: HeadConfig) -> dict[str, Shape]:
    """What maps target features to the head's width."""
    h = config.hidden_size
    shapes: dict[str, Shape] = {}
    if config.has_fc:
        shapes["fc.weight"] = (h, 2 * h if config.kind == "eagle1" else config.feature_size)
    if config.fc_bias:
        shapes["fc.bias"] = (h,)
    if config.fc_norm:
        for i in range(max(1, len(config.aux_layers))):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    if config.fc_input_norm:
        shapes["input_norm.weight"] = (config.feature_size,)
    return shapes


def _layer_shapes(config: HeadConfig, layer: int) -> dict[str, Shape]:
    h, width, p = config.hidden_size, config.intermediate_size, f"layers.{layer}"
    first_eagle3 = layer == 0 and config.kind == "eagle3"
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention_in = 2 * h if first_eagle3 else h
    linears: dict[str, Shape] = {
        f"{p}.self_attn.q_proj": (q, attention_in),
        f"{p}.self_attn.k_proj": (kv, attention_in),
        f"{p}.self_attn.v_proj": (kv, attention_in),
        f"{p}.self_attn.o_proj": (h, q),
        f"{p}.mlp.gate_proj": (width, h),
        f"{p}.mlp.up_proj": (width, h),
        f"{p}.mlp.down_proj": (h, width),
    }
    shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    for name, shape in linears.items():
        if config.attention_bias if ".self_attn." in name else config.mlp_bias:
            shapes[f"{name}.bias"] = shape[:1]
    norms = ["post_attention_layernorm"]
    if layer > 0 or first_eagle3 or config.first_input_norm:
        norms.append("input_layernorm")
    if first_eagle3:
        norms.append("hidden_norm")
    return shapes | {f"{p}.{norm}.weight": (h,) for norm in norms}
