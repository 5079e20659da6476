"""From an opened head file to a :class:`HeadConfig`: sizes and optional parts, decided by tensors.

Configuration values are cross-checked and never trusted over a tensor.  ``max_position_embeddings``,
``tie_word_embeddings`` and ``bias`` of a draft config are not read at all: they are copied from elsewhere in
most published heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.checkpoint.head_aux import check_aux_layers, default_aux_layers
from speccompile.checkpoint.head_formats.base import HeadFacts, RawHead
from speccompile.checkpoint.hf_config import head_dim, read_rope

_Q, _O = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"


@dataclass(frozen=True, kw_only=True)
class HeadOverrides:
    """What the user may state about a head whose file does not say, or says wrongly.

    ``aux_layers`` are input-of-layer numbers.  ``norm_before_residual`` is the residual flavour of the first
    EAGLE-3 layer.
    """

    norm_before_residual: bool | None = None
    aux_layers: tuple[int, ...] | None = None


def head_config(raw: RawHead, facts: HeadFacts, target: LlamaConfig, overrides: HeadOverrides) -> HeadConfig:
    """The head's config; :class:`CheckpointError` where config and tensors contradict each other."""
    kind, h = raw.kind(), raw.shape(_O)[0]
    aux_layers, target_hidden = _features(raw, facts, target, overrides)
    heads = _required_int(raw, facts.llama, "num_attention_heads")
    stated_h = raw.positive_int(facts.llama, "hidden_size") or h
    if stated_h != h:
        raise raw.tensor_error(_O, f"has {h} rows, but hidden_size is {stated_h}")
    vocab = _vocab_size(raw, facts)
    return HeadConfig(
        kind=kind,
        num_hidden_layers=_num_layers(raw, facts),
        hidden_size=h,
        target_hidden_size=target_hidden,
        intermediate_size=_intermediate_size(raw, facts),
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(raw, facts.llama, heads),
        head_dim=head_dim({**facts.llama, "hidden_size": h}, str(raw.config_path)),
        rms_norm_eps=float(facts.llama.get("rms_norm_eps") or 1e-6),
        rope=read_rope(facts.llama, str(raw.config_path)),
        vocab_size=vocab,
        draft_vocab_size=_draft_vocab_size(raw, facts, vocab),
        aux_layers=aux_layers,
        has_fc=raw.has("fc.weight"),
        fc_bias=raw.has("fc.bias"),
        attention_bias=_any_stored(raw, r"self_attn\.\w+\.bias$"),
        mlp_bias=_any_stored(raw, r"mlp\.\w+\.bias$"),
        first_input_norm=facts.first_input_norm,
        final_norm=raw.has("norm.weight") and facts.final_norm,
        norm_before_residual=_residual_flavour(raw, facts, overrides),
        norm_feedback=facts.norm_feedback,
        fc_norm=kind == "eagle3" and _any_stored(raw, r"^fc_norm\."),
        fc_input_norm=kind == "eagle3" and raw.has("input_norm.weight"),
        own_embedding=raw.has("embed_tokens.weight"),
        own_lm_head=raw.has("lm_head.weight"),
    )


def _any_stored(raw: RawHead, pattern: str) -> bool:
    return any(re.search(pattern, name) for name in raw.stored)


def _required_int(raw: RawHead, block: dict[str, Any], key: str) -> int:
    value = raw.positive_int(block, key)
    if value is None:
        raise raw.error(f"{key} is missing")
    return value


def _kv_heads(raw: RawHead, block: dict[str, Any], heads: int) -> int:
    kv_heads = raw.positive_int(block, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise raw.error(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    return kv_heads


def _features(
    raw: RawHead, facts: HeadFacts, target: LlamaConfig, overrides: HeadOverrides
) -> tuple[tuple[int, ...], int]:
    """Aux layers and the width of one target feature."""
    h = raw.shape(_O)[0]
    if raw.kind() == "eagle1" or not raw.has("fc.weight"):
        if overrides.aux_layers:
            raise raw.error("aux_layers override given, but this head takes no aux layers")
        return (), facts.target_hidden_size or h
    layers = facts.aux_layers
    if overrides.aux_layers is not None:
        layers = check_aux_layers(overrides.aux_layers, "aux_layers override")
    if layers is None:
        layers = default_aux_layers(target.num_hidden_layers, raw.config_path)
    width = raw.shape("fc.weight")[-1]
    fallback = h if width % len(layers) else width // len(layers)
    target_hidden = facts.target_hidden_size or fallback
    if width != len(layers) * target_hidden:
        raise raw.tensor_error(
            "fc.weight",
            f"takes {width} features, but aux layers {list(layers)} of target_hidden_size {target_hidden} "
            f"give {len(layers) * target_hidden}; name the layers this head was trained on with the "
            f"aux_layers override",
        )
    return layers, target_hidden


def _residual_flavour(raw: RawHead, facts: HeadFacts, overrides: HeadOverrides) -> bool:
    if raw.kind() == "eagle1":
        if overrides.norm_before_residual is not None:
            raise raw.error("norm_before_residual override given, but an EAGLE-1 head has no such choice")
        return False
    if overrides.norm_before_residual is not None:
        return overrides.norm_before_residual
    if facts.norm_before_residual is None:
        raise raw.error(
            "no 'norm_before_residual', and tools disagree about its default; say how the head was trained "
            "with the norm_before_residual override (true or false)"
        )
    return facts.norm_before_residual


def _num_layers(raw: RawHead, facts: HeadFacts) -> int:
    indices = {int(m[1]) for name in raw.stored if (m := re.match(r"layers\.(\d+)\.", name))}
    stated = raw.positive_int(facts.llama, "num_hidden_layers") or len(indices)
    if indices != set(range(stated)):
        raise raw.error(
            f"num_hidden_layers is {stated}, but {raw.source.files()[0].name} holds layers {sorted(indices)}"
        )
    return len(indices)


def _intermediate_size(raw: RawHead, facts: HeadFacts) -> int:
    """Rows of ``gate_proj``; a ``llama4_text`` draft states them as ``intermediate_size_mlp``."""
    name = "layers.0.mlp.gate_proj.weight"
    rows = raw.shape(name)[0]
    key = "intermediate_size_mlp" if facts.llama.get("model_type") == "llama4_text" else "intermediate_size"
    stated = raw.positive_int(facts.llama, key) or rows
    if stated != rows:
        raise raw.tensor_error(name, f"has {rows} rows, but {key} is {stated}")
    return rows


def _vocab_size(raw: RawHead, facts: HeadFacts) -> int:
    """Size of the target's vocabulary as the head knows it."""
    if facts.llama.get("vocab_size") is None and raw.has("embed_tokens.weight"):
        return raw.shape("embed_tokens.weight")[0]
    return _required_int(raw, facts.llama, "vocab_size")


def _draft_vocab_size(raw: RawHead, facts: HeadFacts, vocab: int) -> int:
    """Rows of the own ``lm_head``, else entries of ``d2t``, else the whole vocabulary."""
    name = next((n for n in ("lm_head.weight", "d2t") if raw.has(n)), None)
    rows = vocab if name is None else raw.shape(name)[0]
    stated = facts.draft_vocab_size or rows
    if stated == rows:
        return rows
    if name is None:
        raise raw.error(
            f"draft_vocab_size is {stated} of {vocab}, but the head holds neither 'lm_head.weight' nor 'd2t'"
        )
    raise raw.tensor_error(name, f"has {rows} rows, but draft_vocab_size is {stated}")
