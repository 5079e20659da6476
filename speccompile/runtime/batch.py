"""The ragged batch of one program call, from small numpy arrays to tensors in contract order.

Legend as in ``ARCHITECTURE.md``: T rows of R requests, W mask words, M blocks per request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from speccompile.runtime.forest import Array
from speccompile.tree.tree import Int64, packed_ancestors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The six layout inputs of a model program: dtypes and shapes as in the contract."""

    position: Int64
    mask: Int64
    cu_rows: Array
    prefix_len: Array
    suffix_start: Array
    block_table: Array

    def padded(self, rows: int) -> Layout:
        """At least ``rows`` rows; those added lie past ``cu_rows[-1]`` and belong to no request."""
        missing = rows - len(self.position)
        if missing <= 0:
            return self
        return replace(
            self,
            position=np.pad(self.position, (0, missing)),
            mask=np.pad(self.mask, ((0, missing), (0, 0))),
        )

    def tensors(self, device: torch.device) -> list[Tensor]:
        arrays = (
            self.position,
            self.mask,
            self.cu_rows,
            self.prefix_len.astype(np.int32),
            self.suffix_start,
            self.block_table,
        )
        return [tensor(array, device) for array in arrays]


def tensor(array: Array, device: torch.device) -> Tensor:
    """``array`` as a tensor; shares memory on the CPU."""
    return torch.from_numpy(array).to(device)


class CausalLayouts:
    """Layouts of runs of consecutive tokens: prompt chunks and the head's accepted pairs."""

    def __init__(self, max_rows: int) -> None:
        self._mask = packed_ancestors(np.arange(max_rows, dtype=np.int64) - 1)

    def make(self, start: Int64, length: Int64, block_table: Array) -> Layout:
        """Request r holds positions ``start[r] .. start[r] + length[r] - 1``, all earlier ones committed."""
        cu_rows = running_sum(length)
        offset = np.arange(cu_rows[-1], dtype=np.int64) - np.repeat(cu_rows[:-1], length)
        return Layout(
            position=np.repeat(start, length) + offset,
            mask=self._mask[offset],
            cu_rows=cu_rows,
            prefix_len=start,
            suffix_start=np.zeros(len(start), np.int32),
            block_table=block_table,
        )


def running_sum(length: Array) -> Array:
    """i32 [0, l0, l0 + l1, ...]."""
    total = np.zeros(len(length) + 1, np.int32)
    np.cumsum(length, out=total[1:])
    return total


def joined(first: Layout, second: Layout) -> Layout:
    """The requests of ``first`` followed by those of ``second``, in one call."""
    return Layout(
        position=np.concatenate([first.position, second.position]),
        mask=np.concatenate([first.mask, second.mask]),
        cu_rows=np.concatenate([first.cu_rows, second.cu_rows[1:] + first.cu_rows[-1]]),
        prefix_len=np.concatenate([first.prefix_len, second.prefix_len]),
        suffix_start=np.concatenate([first.suffix_start, second.suffix_start]),
        block_table=np.concatenate([first.block_table, second.block_table]),
    )
