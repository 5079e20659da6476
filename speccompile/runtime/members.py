"""Who takes part in a round, and what of them the program calls need, gathered once.

G decoding requests come first, C requests that read a prompt chunk after them; arrays are indexed
in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from speccompile.runtime.batch import running_sum, tensor
from speccompile.runtime.forest import Array, Forest
from speccompile.runtime.request import Request
from speccompile.tree.tree import Int64


@dataclass(frozen=True)
class Chunk:
    """The next ``length`` prompt tokens of a request; ``ends_prompt`` when none remain after them.

    ``head_reads``: the head reads the chunks before this one now, as the request is going to draft.
    """

    request: Request
    length: int
    ends_prompt: bool
    head_reads: bool


class Members:
    """The requests of one round as arrays over [G + C]."""

    def __init__(self, decoding: Sequence[Request], chunks: Sequence[Chunk], forest: Forest) -> None:
        self.decoding, self.chunks, self.forest = decoding, chunks, forest
        self.requests = [*decoding, *(chunk.request for chunk in chunks)]
        params = [request.params for request in self.requests]
        self.committed = np.array([request.committed for request in self.requests], np.int64)
        self.block_table = np.stack([request.block_row for request in self.requests])
        self._temperature = np.array([p.temperature for p in params], np.float32)
        self._top_k = np.array([p.top_k for p in params], np.int64)
        self._top_p = np.array([p.top_p for p in params], np.float32)
        self._min_p = np.array([p.min_p for p in params], np.float32)
        self._seed = np.array([request.seed for request in self.requests], np.int64)

    def draft_inputs(self, owner: Int64, device: torch.device) -> list[Tensor]:
        """Temperature and seed of draft rows; ``owner`` [rows] says whose they are."""
        return [tensor(self._temperature[owner], device), tensor(self._seed[owner], device)]

    def accept_inputs(self, device: torch.device) -> list[Tensor]:
        """Temperature, top_k, top_p, min_p and seed of the requests that draw."""
        fields = (self._temperature, self._top_k, self._top_p, self._min_p, self._seed)
        return [tensor(values[self.drawing], device) for values in fields]

    @cached_property
    def readers(self) -> Int64:
        """Whose pending features the head reads: those that draft first, then those amid their prompt."""
        amid = [
            i
            for i, chunk in enumerate(self.chunks, len(self.decoding))
            if chunk.head_reads and chunk.request.pending
        ]
        return np.concatenate([self.forest.drafting, np.array(amid, np.int64)])

    @cached_property
    def drawing(self) -> Int64:
        """Who draws tokens in this round: all but those whose prompt goes on."""
        first = len(self.decoding)
        ends = [first + c for c, chunk in enumerate(self.chunks) if chunk.ends_prompt]
        return np.concatenate([np.arange(first, dtype=np.int64), np.array(ends, np.int64)])

    @cached_property
    def chunk_cu_rows(self) -> Array:
        """i32 [C + 1]: rows of the target call that hold the chunks, which follow the trees."""
        return (
            running_sum(np.array([chunk.length for chunk in self.chunks], np.int64))
            + self.forest.rows.cu_rows[-1]
        )
