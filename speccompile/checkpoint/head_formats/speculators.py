"""Heads in the ``speculators`` format (vLLM, Red Hat): EAGLE-3, and the removed EAGLE-1 variant.

The Llama fields live in ``transformer_layer_config``.  Tools disagree about the default of
``norm_before_residual``, so a file without the key is refused until the user says which it is.
"""

from __future__ import annotations

from typing import Any

from speccompile.checkpoint.head_aux import stated_aux_layers
from speccompile.checkpoint.head_formats.base import (
    EAGLE1_CLAIMS,
    EAGLE3_CLAIMS,
    HeadFacts,
    HeadFormat,
    RawHead,
    claims_of,
)

_FLAGS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}


def _is_eagle3(raw: RawHead) -> bool:
    return "speculators_model_type" in raw.config and raw.kind() == "eagle3"


def _is_eagle1(raw: RawHead) -> bool:
    return "speculators_model_type" in raw.config and raw.kind() == "eagle1"


def _llama_block(raw: RawHead, stated: str) -> dict[str, Any]:
    if raw.config["speculators_model_type"] != stated:
        raise raw.error(
            f"'speculators_model_type' is {raw.config['speculators_model_type']!r}, but the tensors are "
            f"those of {stated!r}"
        )
    block = raw.config.get("transformer_layer_config")
    if not isinstance(block, dict):
        raise raw.error("no 'transformer_layer_config' block, which a speculators head must have")
    return block


def _read_eagle3(raw: RawHead) -> HeadFacts:
    config = raw.config
    return HeadFacts(
        llama=_llama_block(raw, "eagle3"),
        draft_vocab_size=raw.positive_int(config, "draft_vocab_size"),
        target_hidden_size=raw.positive_int(config, "target_hidden_size"),
        aux_layers=stated_aux_layers(config, raw.config_path),
        norm_before_residual=config.get("norm_before_residual"),
        norm_feedback=bool(config.get("norm_output", False)),
        claims=EAGLE3_CLAIMS + claims_of(config, _FLAGS),
    )


def _read_eagle1(raw: RawHead) -> HeadFacts:
    return HeadFacts(
        llama=_llama_block(raw, "eagle"),
        claims=EAGLE1_CLAIMS + claims_of(raw.config, {"fusion_bias": "fc.bias"}),
    )


SPECULATORS = HeadFormat(name="speculators EAGLE-3", matches=_is_eagle3, read=_read_eagle3)
SPECULATORS_1 = HeadFormat(name="speculators EAGLE-1", matches=_is_eagle1, read=_read_eagle1)
