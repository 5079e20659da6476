"""Heads of the EAGLE authors (SafeAILab) and SpecForge, which shares the EAGLE-3 layout.

EAGLE-1 and EAGLE-2 heads are the same files.  Our own extensions of the EAGLE-1 layout: ``d2t`` and
``draft_vocab_size`` without an ``lm_head`` are a reduced vocabulary over the target's own rows, as in FR-Spec
(arXiv 2502.14856); ``"layer_norms": true`` announces a norm before the first attention and a final one, so
that the layers can start as the target's own.  Such a head feeds back what its final norm gives, because
features are post-norm.  SpecForge adds ``eagle_config`` ids, ``fc_norm`` and ``norm_output``; its
``norm_output`` says whether ``norm`` is applied before ``lm_head``, which differs from the speculators key of
that name.
"""

from __future__ import annotations

from speccompile.checkpoint.head_aux import stated_aux_layers
from speccompile.checkpoint.head_formats.base import (
    EAGLE1_CLAIMS,
    EAGLE3_CLAIMS,
    HeadFacts,
    HeadFormat,
    RawHead,
    claims_of,
)

LAYER_NORMS = "layer_norms"
"""Key of ``config.json`` for EAGLE-1 heads with all of the target's norms."""


def _has_midlayer(raw: RawHead) -> bool:
    return any(name.startswith("midlayer.") for name in raw.stored.values())


def _is_eagle1(raw: RawHead) -> bool:
    return not _has_midlayer(raw) and raw.kind() == "eagle1"


def _read_eagle1(raw: RawHead) -> HeadFacts:
    if str(raw.config.get("model_type", "")).startswith("llama4"):
        raise raw.error("an EAGLE-1 head built of Llama 4 layers is not supported; use an EAGLE-3 head")
    normed = raw.config.get(LAYER_NORMS) is True
    return HeadFacts(
        llama=raw.config,
        draft_vocab_size=raw.positive_int(raw.config, "draft_vocab_size"),
        target_hidden_size=raw.positive_int(raw.config, "target_hidden_size"),
        norm_feedback=normed,
        first_input_norm=normed,
        claims=EAGLE1_CLAIMS + (claims_of(raw.config, {LAYER_NORMS: "norm.weight"}) if normed else ()),
    )


def _read_eagle3(raw: RawHead) -> HeadFacts:
    return HeadFacts(
        llama=raw.config,
        draft_vocab_size=raw.positive_int(raw.config, "draft_vocab_size"),
        target_hidden_size=raw.positive_int(raw.config, "target_hidden_size"),
        aux_layers=stated_aux_layers(raw.config, raw.config_path),
        norm_before_residual=raw.config.get("norm_before_residual", False),
        final_norm=raw.config.get("norm_output") is not False,
        claims=EAGLE3_CLAIMS + claims_of(raw.config, {"fc_norm": "fc_norm.0.weight"}),
    )


SAFEAILAB_1 = HeadFormat(name="SafeAILab EAGLE-1/2", matches=_is_eagle1, read=_read_eagle1)
SAFEAILAB_3 = HeadFormat(name="SafeAILab/SpecForge EAGLE-3", matches=_has_midlayer, read=_read_eagle3)
