"""Draft models that look like EAGLE heads and are not supported, each refused under its own name.

Tensors decide first; configuration keys and architecture names only add what tensors cannot show.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from speccompile.checkpoint.tensors import TensorSource, read_json
from speccompile.errors import CheckpointError

_BY_TENSOR: tuple[tuple[str, str], ...] = (
    (r"(^|\.)model\.layers\.|^language_model\.", "a full model, not a draft head"),
    (r"^blk\.\d+\.", "a GGUF model, not a draft head"),
    (r"(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|kv_a_layernorm)", "an MLA draft (DeepSeek attention)"),
    (r"(^|\.)medusa|parallel_draft_heads", "a Medusa (parallel heads) draft"),
    (r"^mask_hidden$", "a P-EAGLE (parallel EAGLE) draft"),
    (r"markov|confidence_head", "a DSpark draft"),
    (r"(^|\.)(mtp|mtp_layers)\.|(^|\.)(eh_proj|enorm|hnorm)\.", "an MTP (multi-token prediction) draft"),
    (
        r"^(embed|embedding|hidden|hidden_states|lm_head|pre_lm_head)_layernorm\.",
        "a layernormed EAGLE-1 head (HASS)",
    ),
    (r"\.(q_norm|k_norm)\.", "a Qwen3 draft (query and key norms)"),
    (r"\.(experts|router|shared_expert)\b", "a mixture-of-experts draft"),
    (r"(weight_scale|input_scale|weight_zero_point|qweight|qzeros|weight_packed)", "a quantised head"),
)

_BY_MODEL_TYPE = {
    "peagle": "a P-EAGLE (parallel EAGLE) draft",
    "dflash": "a DFlash draft",
    "domino": "a Domino draft",
    "dspark": "a DSpark draft",
    "mtp": "an MTP (multi-token prediction) draft",
    "medusa": "a Medusa (parallel heads) draft",
    "deepseek": "an MLA draft (DeepSeek attention)",
    "kimi": "an MLA draft (DeepSeek attention)",
    "mistrallarge3": "an MLA draft (DeepSeek attention)",
}

_BY_KEY = {
    "dflash_config": "a DFlash draft",
    "domino_config": "a Domino draft",
    "dspark_config": "a DSpark draft",
    "medusa_num_heads": "a Medusa (parallel heads) draft",
    "kv_lora_rank": "an MLA draft (DeepSeek attention)",
    "truncated_vocab_size": "an EAGLE-1 head in the old vLLM conversion",
    "add_para_norm": "a layernormed EAGLE-1 head (HASS)",
    "layernorms": "a layernormed EAGLE-1 head (HASS)",
}

_EAGLE_CONFIG = {
    "eh_proj_before_attn": "an EAGLE-3 head with a projection before attention (eh_proj_before_attn)",
    "use_mtp_layernorm": "an MTP (multi-token prediction) draft",
}


def refuse_training_state(folder: Path) -> None:
    """A SpecForge training folder is not a draft head."""
    if (folder / "training_state.pt").is_file():
        raise CheckpointError(
            f"{folder}: a SpecForge training checkpoint (training_state.pt), not a draft head; export it"
        )


def refuse_tensors(folder: Path, source: TensorSource) -> None:
    """Raises for the first tensor that only an unsupported kind of draft has, or for a quantised dtype."""
    for pattern, kind in _BY_TENSOR:
        for name in source.names():
            if re.search(pattern, name):
                raise _refusal(folder / source.where(name), kind, f"tensor {name!r}")
    for name in source.names():
        dtype = source.dtype(name)
        if name not in ("d2t", "t2d") and (dtype.itemsize == 1 or not dtype.is_floating_point):
            raise _refusal(folder / source.where(name), "a quantised head", f"tensor {name!r} is {dtype}")


def refuse_config(path: Path, config: dict[str, Any]) -> None:
    """Raises for a configuration that names an unsupported kind of draft or a quantised one."""
    names = [config.get("speculators_model_type"), config.get("model_type"), *_list(config, "architectures")]
    for name in names:
        # "P-EAGLE", "PEagleDraftModel" and "peagle" are the same word.
        word = re.sub(r"[^a-z0-9]", "", str(name).lower())
        for fragment, kind in _BY_MODEL_TYPE.items():
            if fragment in word:
                raise _refusal(path, kind, f"{name!r}")
    for key, kind in _BY_KEY.items():
        if config.get(key):
            raise _refusal(path, kind, f"key {key!r}")
    _refuse_eagle_config(path, config.get("eagle_config") or {})
    _refuse_quantised(path, config)


def _refuse_eagle_config(path: Path, nested: dict[str, Any]) -> None:
    for key, kind in _EAGLE_CONFIG.items():
        if nested.get(key):
            raise _refusal(path, kind, f"eagle_config.{key}")
    if (nested.get("parallel_draft_step") or 1) > 1:
        raise _refusal(path, _BY_KEY["medusa_num_heads"], "eagle_config.parallel_draft_step")
    if nested.get("next_layer_regular") is False:
        raise _refusal(path, "an EAGLE-3 head whose later layers re-read the embedding", "next_layer_regular")


def _refuse_quantised(path: Path, config: dict[str, Any]) -> None:
    """``quant_algo: null`` in ``hf_quant_config.json`` (ModelOpt) means that nothing is quantised."""
    blocks = [(path, config.get("quantization_config"))]
    extra = path.with_name("hf_quant_config.json")
    if extra.is_file():
        blocks.append((extra, read_json(extra)))
    for file, block in blocks:
        if not isinstance(block, dict):
            continue
        inner = block.get("quantization") or block
        algorithm = inner.get("quant_algo") or (
            inner.get("quant_method") if "quant_algo" not in inner else None
        )
        if algorithm:
            raise _refusal(file, "a quantised head", f"quantisation {algorithm!r}")


def _list(config: dict[str, Any], key: str) -> list[Any]:
    value = config.get(key) or []
    return value if isinstance(value, list) else [value]


def _refusal(path: Path, kind: str, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {kind} ({evidence}) is not supported; give an unquantised EAGLE-1, EAGLE-2 or EAGLE-3 head"
    )
