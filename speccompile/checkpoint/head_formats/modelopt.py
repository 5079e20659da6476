"""EAGLE-3 heads exported by NVIDIA ModelOpt: layers numbered from 0 and an ``eagle_config`` block.

Without ``use_aux_hidden_state`` there is no ``fc``, and the head takes the target's post-norm hidden state
(TensorRT-LLM: "capture layer -1").  A file of this layout without ``eagle_config`` could come from a
converted speculators head, so its residual flavour has to be stated.
"""

from __future__ import annotations

from speccompile.checkpoint.head_aux import stated_aux_layers
from speccompile.checkpoint.head_formats.base import HeadFacts, HeadFormat, RawHead, claims_of

_FLAGS = {
    "use_aux_hidden_state": "fc.weight",
    "use_last_layernorm": "norm.weight",
    "use_input_layernorm_in_first_layer": "layers.0.input_layernorm.weight",
    "norm_before_fc": "input_norm.weight",
}


def _is_eagle3(raw: RawHead) -> bool:
    return raw.kind() == "eagle3"


def _read(raw: RawHead) -> HeadFacts:
    nested = raw.eagle_config
    flavour = raw.config.get("norm_before_residual", False if nested else None)
    return HeadFacts(
        llama=raw.config,
        draft_vocab_size=raw.positive_int(raw.config, "draft_vocab_size"),
        target_hidden_size=raw.positive_int(raw.config, "target_hidden_size"),
        aux_layers=stated_aux_layers(raw.config, raw.config_path) if raw.has("fc.weight") else None,
        norm_before_residual=flavour,
        norm_feedback=bool(nested.get("return_hidden_post_norm", False)),
        claims=claims_of({"use_aux_hidden_state": True, "use_last_layernorm": True, **nested}, _FLAGS)
        + claims_of(raw.config, {"fc_norm": "fc_norm.0.weight"}),
    )


MODELOPT = HeadFormat(name="ModelOpt EAGLE-3", matches=_is_eagle3, read=_read)
