"""Hugging Face ``config.json`` and ``generation_config.json`` as a :class:`LlamaConfig`.

Works on the raw JSON, because the attributes of transformers' config objects changed their meaning between
versions 4 (``rope_theta`` + ``rope_scaling``) and 5 (``rope_parameters``).  Defaults for absent keys are
those of transformers' ``LlamaConfig``.  What the graph cannot run exactly is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.checkpoint.tensors import read_json
from speccompile.errors import CheckpointError

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_llama_config(folder: Path) -> LlamaConfig:
    """The target's config from a Hugging Face folder.

    ``eos_token_ids`` is the union of ``generation_config.json`` and ``config.json``, in this order; for
    ``bos_token_id`` the former goes first.
    """
    path = folder / "config.json"
    raw = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return llama_config(raw, generation, str(path))


def llama_config(raw: dict[str, Any], generation: dict[str, Any], where: str) -> LlamaConfig:
    """Same as :func:`read_llama_config` on parsed JSON; ``where`` is the file name for messages."""
    _refuse_other_models(raw, where)
    for key in _REQUIRED:
        _positive_int(raw, key, where)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if not isinstance(kv_heads, int) or heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads {kv_heads!r} does not divide num_attention_heads {heads}"
        )
    return LlamaConfig(
        **{key: raw[key] for key in _REQUIRED},
        num_key_value_heads=kv_heads,
        head_dim=head_dim(raw, where),
        rms_norm_eps=_number({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", where),
        rope=read_rope(raw, where),
        max_position_embeddings=_positive_int(
            {"max_position_embeddings": 2048, **raw}, "max_position_embeddings", where
        ),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        bos_token_id=_first_id(generation.get("bos_token_id", raw.get("bos_token_id"))),
        eos_token_ids=_eos_ids(generation, raw, where),
    )


def _refuse_other_models(raw: dict[str, Any], where: str) -> None:
    model_type = raw.get("model_type", "llama")
    names = [*(raw.get("architectures") or []), model_type]
    if any(str(n).lower().startswith("llama4") for n in names):
        raise CheckpointError(
            f"{where}: {names[0]} (Llama 4) is not supported yet; use a Llama 2 or 3.x model"
        )
    for name in names[:-1]:
        if name != "LlamaForCausalLM":
            raise CheckpointError(
                f"{where}: architecture {name!r} is not supported; only LlamaForCausalLM is"
            )
    if model_type != "llama":
        raise CheckpointError(f"{where}: model_type {model_type!r} is not supported; only 'llama' is")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{where}: quantization_config with quant_method {method!r} is not supported; "
            f"use the unquantized checkpoint"
        )


def _positive_int(raw: dict[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{where}: {key} must be a positive integer, found {value!r}")
    return value


def head_dim(raw: dict[str, Any], where: str) -> int:
    """``head_dim`` when present, else ``hidden_size / num_attention_heads`` (which must divide)."""
    if raw.get("head_dim") is not None:
        return _positive_int(raw, "head_dim", where)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if hidden % heads:
        raise CheckpointError(
            f"{where}: no head_dim, and num_attention_heads {heads} does not divide hidden_size {hidden}"
        )
    return hidden // heads


def _first_id(value: Any) -> int | None:
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def _as_ids(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


def _eos_ids(generation: dict[str, Any], raw: dict[str, Any], where: str) -> tuple[int, ...]:
    ids = list(dict.fromkeys([*_as_ids(generation.get("eos_token_id")), *_as_ids(raw.get("eos_token_id"))]))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < raw["vocab_size"]:
            raise CheckpointError(
                f"{where}: eos_token_id {token!r} (here or in generation_config.json) is not an id of a "
                f"vocabulary of {raw['vocab_size']}"
            )
    return tuple(ids)


def read_rope(raw: dict[str, Any], where: str) -> RopeConfig:
    """The rotary embedding of a raw Hugging Face config of transformers 4 or 5 (targets and heads alike).

    Accepts top-level ``rope_theta`` with ``rope_scaling`` (``type`` or ``rope_type``), and
    ``rope_parameters``, flat or nested by layer type.  A missing theta is 10000.  Blocks that disagree are an
    error.
    """
    blocks: list[dict[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key):
            blocks += _flat_blocks(raw[key], f"{where}: {key}")
    ropes = {_rope(block, raw, where) for block in blocks or [{}]}
    if len(ropes) > 1:
        raise CheckpointError(
            f"{where}: the rope settings disagree with each other: {sorted(map(str, ropes))}"
        )
    return ropes.pop()


def _flat_blocks(block: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(block, dict):
        raise CheckpointError(f"{where} must be an object, found {block!r}")
    nested = [value for value in block.values() if isinstance(value, dict)]
    if nested and len(nested) != sum(value is not None for value in block.values()):
        raise CheckpointError(f"{where} mixes settings with per-layer-type objects")
    return nested or [block]


def _rope(block: dict[str, Any], raw: dict[str, Any], where: str) -> RopeConfig:
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"{where}: rope type {kind!r} is not supported; one of {', '.join(_ROPE_KINDS)} is"
        )
    if block.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise CheckpointError(f"{where}: partial_rotary_factor other than 1 is not supported")
    owner = block if block.get("rope_theta") is not None else raw
    theta = _number(owner, "rope_theta", where) if owner.get("rope_theta") is not None else 10000.0
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _number(block, "factor", where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=_number(block, "low_freq_factor", where),
            high_freq_factor=_number(block, "high_freq_factor", where),
            original_max_position_embeddings=int(_number(block, "original_max_position_embeddings", where)),
        )
    return _yarn(block, raw, theta, factor, where)


def _yarn(block: dict[str, Any], raw: dict[str, Any], theta: float, factor: float, where: str) -> RopeConfig:
    if block.get("truncate", True) is not True:
        raise CheckpointError(f"{where}: yarn rope with truncate false is not supported")
    original = block.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048)
    attention_factor = block.get("attention_factor")
    mscale, mscale_all_dim = block.get("mscale"), block.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=int(original),
        beta_fast=float(block.get("beta_fast") or 32.0),
        beta_slow=float(block.get("beta_slow") or 1.0),
        attention_factor=attention_factor,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(block: dict[str, Any], key: str, where: str) -> float:
    value = block.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{where}: {key} must be a positive number, found {value!r}")
    return float(value)
