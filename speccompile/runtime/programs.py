"""What the runtime needs from an engine: four callables, their sizes and the KV they update.

The callables take the inputs of :mod:`speccompile.contract` by position, a KV cache as two lists
(keys per layer, values per layer), and return a tuple of the outputs.  Who made them is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Program = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes the programs were made for.

    ``max_rows`` bounds the token rows of one call, all requests together; ``max_seq_len`` is in
    tokens, prompt included; ``draft_topk`` candidates per drafted row; ``block_size`` KV slots;
    ``min_target_rows`` the rows, and rows with logits, that ``target_step`` takes at least (padding
    rows belong to no request).
    """

    max_batch_size: int
    max_seq_len: int
    max_rows: int
    max_tree_depth: int
    draft_topk: int
    block_size: int
    min_target_rows: int

    @property
    def mask_words(self) -> int:
        """Words W of a packed suffix mask; one request may fill a whole call."""
        return -(-self.max_rows // 64)

    @property
    def blocks_per_request(self) -> int:
        """Width M of a block table."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def rows_per_request(self) -> int:
        """Rows every one of ``max_batch_size`` requests can have in one call."""
        return self.max_rows // self.max_batch_size

    @property
    def default_num_blocks(self) -> int:
        """Blocks that let ``max_batch_size`` requests of full length run, plus the one never used."""
        return 1 + self.max_batch_size * self.blocks_per_request


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


BlockShapes = tuple[tuple[int, ...], tuple[int, ...]]


def allocate_layers(
    num_layers: int, num_blocks: int, shapes: BlockShapes, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Zeroed keys and values of ``num_layers`` layers; ``shapes`` are those of one block of K and of V."""

    def zeros(shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.zeros(num_blocks, *shape, dtype=dtype) for _ in range(num_layers)]

    keys, values = map(zeros, shapes)
    return keys, values
