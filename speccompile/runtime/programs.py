"""What the runtime needs from an engine: four callables, their sizes and the KV they update.

The callables take the inputs of :mod:`speccompile.contract` by position, a KV cache as two lists
(keys per layer, values per layer), and return a tuple of the outputs.  Who made them is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speccompile.limits import BlockShapes, Limits

Program = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class ProgramSet:
    """The programs of one engine; without a head the two draft programs are None."""

    limits: Limits
    target_step: Program
    accept: Program
    draft_extend: Program | None = None
    draft_step: Program | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def has_head(self) -> bool:
        return self.draft_extend is not None and self.draft_step is not None


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """Caches of target and head: one key and one value tensor per layer, ``num_blocks`` blocks each."""

    num_blocks: int
    target_keys: list[Tensor]
    target_values: list[Tensor]
    draft_keys: list[Tensor] = field(default_factory=list)
    draft_values: list[Tensor] = field(default_factory=list)

    @property
    def target(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.target_keys, self.target_values

    @property
    def draft(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.draft_keys, self.draft_values


def allocate_layers(
    num_layers: int, num_blocks: int, shapes: BlockShapes, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of ``num_layers`` layers; ``shapes`` are those of one block of K and of V.

    Left uninitialised, so that memory is taken only by blocks in use; no operator reads a slot before
    it is written.
    """

    def layers(shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.empty(num_blocks, *shape, dtype=dtype) for _ in range(num_layers)]

    keys, values = map(layers, shapes)
    return keys, values
