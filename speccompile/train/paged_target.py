"""The target over a paged KV cache: one call reads prompt chunks and single tokens of many conversations.

Calls any program with the signature of ``target_step`` (:mod:`speccompile.contract`), compiled or not.
Legend: T rows of a call, N scored rows, V vocabulary, F width of the kept features, M blocks per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speccompile.limits import Limits, kv_block_shapes
from speccompile.model.llama import Llama
from speccompile.runtime.batch import CausalLayouts, tensor
from speccompile.runtime.programs import Program, allocate_layers


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of the conversation in ``slot``, the first at position ``start``; ``scored``:
    logits after the last one are wanted."""

    slot: int
    start: int
    ids: Sequence[int]
    scored: bool


class PagedTarget:
    """``limits.max_batch_size`` slots, each with room for ``max_seq_len`` tokens and their features.

    A slot is reused by starting again at position 0.  ``feature_size`` 0 keeps no features.
    """

    def __init__(self, program: Program, target: Llama, limits: Limits, feature_size: int) -> None:
        weight = target.embed_tokens.weight
        self.limits, self._program, self._device = limits, program, weight.device
        self._causal = CausalLayouts(limits.max_rows)
        blocks = np.arange(1, limits.default_num_blocks, dtype=np.int32)
        self._table_SM = blocks.reshape(limits.max_batch_size, limits.blocks_per_request)
        shapes = kv_block_shapes(target.config, limits.block_size)
        room = (limits.max_batch_size, limits.max_seq_len, feature_size)
        with self._device:
            self._kv = allocate_layers(
                target.config.num_hidden_layers, limits.default_num_blocks, shapes, weight.dtype
            )
            self._feature_SLF = torch.empty(room, dtype=weight.dtype)

    @torch.no_grad()
    def read(self, spans: Sequence[Span]) -> Tensor:
        """Logits f32 [N, V] of the scored spans; together the spans have at most ``limits.max_rows`` ids."""
        slot = np.array([s.slot for s in spans])
        length = np.array([len(s.ids) for s in spans])
        layout = self._causal.make(
            np.array([s.start for s in spans], np.int64), length, self._table_SM[slot]
        ).padded(self.limits.min_target_rows)
        rows = int(layout.cu_rows[-1])
        token = np.zeros(len(layout.position), np.int64)
        token[:rows] = np.concatenate([s.ids for s in spans])
        ends = layout.cu_rows[1:][[s.scored for s in spans]] - 1
        scored = np.zeros(max(self.limits.min_target_rows, len(ends)), np.int64)
        scored[: len(ends)] = ends
        inputs = (tensor(token, self._device), *layout.tensors(self._device), tensor(scored, self._device))
        logits, feature = self._program(*inputs, *self._kv)
        if self._feature_SLF.shape[2]:
            where = (np.repeat(slot, length), layout.position[:rows])
            self._feature_SLF[tuple(tensor(w, self._device) for w in where)] = feature[:rows]
        return logits[: len(ends)]

    def features(self, slot: int, count: int) -> Tensor:
        """A copy of the features of the first ``count`` positions of a slot, [count, F]."""
        return self._feature_SLF[slot, :count].clone()
