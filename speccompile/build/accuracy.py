"""What 8-bit weights cost: the quantized target against the unquantized one on calibration texts.

Owns the order of things: the unquantized graphs run the texts once (hidden states are kept, input ranges
noted), both are quantized in place (two sets of layers never exist side by side, only the old ``lm_head``
waits), then the target runs the texts again.
Legend: n positions of a text, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speccompile.build.manifest import QuantizationReport
from speccompile.model.eagle import EagleHead
from speccompile.model.int8 import measure_inputs, quantize_linears, unquantized_weights
from speccompile.model.layers import causal_attend
from speccompile.model.llama import Llama

_ROWS = 64  # positions whose logits are held at once


@torch.no_grad()
def quantize_and_compare(
    target: Llama, head: EagleHead | None, texts: Sequence[Tensor], calibration: str
) -> QuantizationReport:
    """Quantize ``target`` and ``head`` in place; ``texts`` are ids i64 [n], ``calibration`` their name."""
    before: list[Tensor] = []
    lm_head = target.lm_head
    inputs = measure_inputs(target, lambda: before.extend(_scored(target, ids) for ids in texts))
    if head is not None:
        quantize_linears(head, measure_inputs(head, lambda: _draft(head, target, texts)))
    quantize_linears(target, inputs)
    divergence, agreeing = 0.0, 0
    for ids, hidden_nh in zip(texts, before, strict=True):
        pairs = zip(hidden_nh.split(_ROWS), _hidden(target, ids).split(_ROWS), strict=True)
        for old_nh, new_nh in pairs:
            old_nV, new_nV = lm_head(old_nh).float(), target.lm_head(new_nh)
            divergence += float(_divergence(old_nV, new_nV).sum())
            agreeing += int((old_nV.argmax(-1) == new_nV.argmax(-1)).sum())
    positions = sum(map(len, texts))
    return QuantizationReport(
        calibration=calibration,
        positions=positions,
        mean_kl=divergence / positions,
        top1_agreement=agreeing / positions,
        kept=tuple(_kept("target", target) + (_kept("head", head) if head else [])),
    )


def _kept(name: str, model: nn.Module) -> list[str]:
    return [f"{name}.{weight}" for weight in unquantized_weights(model)]


def _hidden(target: Llama, ids: Tensor) -> Tensor:
    """Post-norm hidden states [n, h]."""
    hidden, _ = target(ids[None], torch.arange(len(ids))[None], causal_attend)
    return hidden[0]


def _scored(target: Llama, ids: Tensor) -> Tensor:
    """As :func:`_hidden`; ``lm_head`` sees them too, a few at a time."""
    hidden_nh = _hidden(target, ids)
    for part in hidden_nh.split(_ROWS):
        target.lm_head(part)
    return hidden_nh


def _draft(head: EagleHead, target: Llama, texts: Sequence[Tensor]) -> None:
    """Run the head as ``draft_extend`` does: pairs of a position's feature and the next token."""
    for ids in texts:
        position = torch.arange(len(ids))[None]
        _, feature = target(ids[None], position, causal_attend, head.config.aux_layers)
        _, scored = head(ids[None, 1:], head.fuse(feature[:, :-1]), position[:, :-1], causal_attend)
        head.lm_head(scored)


def _divergence(old_nV: Tensor, new_nV: Tensor) -> Tensor:
    """KL(old || new) per row, f32 [n]."""
    old, new = (logits.log_softmax(-1) for logits in (old_nV, new_nV))
    return nn.functional.kl_div(new, old, reduction="none", log_target=True).sum(-1)
