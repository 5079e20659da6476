"""Which target layers feed an EAGLE-3 head, in one numbering.

Our numbering is "input of layer i" (SafeAILab, vLLM): the residual stream before layer i.  SpecForge,
ModelOpt and TensorRT-LLM count "output of layer i", which is one less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.errors import CheckpointError

_KEY = "eagle_aux_hidden_state_layer_ids"


def usual_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """{2, N/2, N-3} (SafeAILab default), whatever they are for a small N."""
    return (2, num_layers // 2, num_layers - 3)


def default_aux_layers(num_layers: int, path: Path | str) -> tuple[int, ...]:
    """:func:`usual_aux_layers`.  Raises when they are not three ascending layers (N < 7)."""
    layers = usual_aux_layers(num_layers)
    if not 2 < layers[1] < layers[2]:
        raise CheckpointError(
            f"{path}: no {_KEY}, and the default layers {{2, N/2, N-3}} = {layers} collapse for a target of "
            f"{num_layers} layers; name the layers with the aux_layers override (input-of-layer numbers)"
        )
    return layers


def stated_aux_layers(config: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """Layer ids a config states, in our numbering and ascending order; None when it states none.

    The key inside ``eagle_config`` holds output-of-layer numbers, the top-level key input-of-layer numbers.
    """
    nested = _ids((config.get("eagle_config") or {}).get(_KEY), path)
    top = _ids(config.get(_KEY), path)
    converted = None if nested is None else tuple(i + 1 for i in nested)
    if top is not None and converted is not None and top != converted:
        raise CheckpointError(
            f"{path}: {_KEY} {list(top)} (input of layer) and eagle_config.{_KEY} {list(nested or ())} "
            f"(output of layer) name different layers; choose with the aux_layers override"
        )
    return top if top is not None else converted


def check_aux_layers(layers: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Sorted layers; the features are always concatenated in ascending layer order."""
    if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
        raise CheckpointError(
            f"{where}: aux layers {list(layers)} must be distinct, not negative, at least one"
        )
    return tuple(sorted(layers))


def _ids(value: Any, path: Path) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
        raise CheckpointError(f"{path}: {_KEY} must be a list of integers, found {value!r}")
    return check_aux_layers(tuple(value), f"{path}: {_KEY}")
