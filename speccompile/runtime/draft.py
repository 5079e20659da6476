"""The draft phase of a round: the head catches up with the target, then proposes, depth by depth."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from speccompile.runtime.batch import CausalLayouts, Layout, tensor
from speccompile.runtime.forest import ForestLevel
from speccompile.runtime.members import Members
from speccompile.runtime.programs import KvCache, ProgramSet


class Drafter:
    """Calls ``draft_extend`` and ``draft_step``.

    The pair (feature of position i, token i + 1) has slot i and position i.  After ``draft_extend``
    the head has read the pairs 0 .. L-1, L being the target's committed length, so the fed nodes of
    depth d take position L + d - 1 and suffix slots from L.
    """

    def __init__(self, programs: ProgramSet, kv: KvCache, causal: CausalLayouts) -> None:
        self._programs, self._kv, self._causal = programs, kv, causal
        self._device = programs.device

    def propose(self, members: Members, feature: Tensor | None) -> list[Tensor]:
        """Candidates [rows, K] of each draft call, as ``Forest.token_source`` counts them.

        ``feature``: output of the last ``target_step``, which all pending rows point into.
        """
        if not len(members.readers):
            return []
        hidden, topk = self._extend(members, feature)
        candidates = [topk[: len(members.forest.drafting)]]
        for level in members.forest.levels:
            hidden, topk = self._step(members, level, hidden, topk)
            candidates.append(topk)
        return candidates

    def _extend(self, members: Members, feature: Tensor | None) -> tuple[Tensor, ...]:
        readers = [members.requests[i] for i in members.readers]
        pending = [request.pending for request in readers if request.pending]
        assert len(pending) == len(readers) and feature is not None
        assert self._programs.draft_extend is not None
        layout = self._causal.make(
            start=np.array([item.start for item in pending], np.int64),
            length=np.array([len(item.rows) for item in pending], np.int64),
            block_table=members.block_table[members.readers],
        )
        token = np.array([token for request in readers for token in request.pending_tokens()], np.int64)
        return self._programs.draft_extend(
            tensor(token, self._device),
            *layout.tensors(self._device),
            feature,
            tensor(np.concatenate([item.rows for item in pending]), self._device),
            tensor(layout.cu_rows[1:].astype(np.int64) - 1, self._device),
            *members.draft_inputs(members.readers, self._device),
            *self._kv.draft,
        )

    def _step(self, members: Members, level: ForestLevel, hidden: Tensor, topk: Tensor) -> tuple[Tensor, ...]:
        rows = level.rows
        assert self._programs.draft_step is not None
        layout = Layout(
            position=members.committed[rows.owner] + (level.depth - 1),
            mask=rows.mask,
            cu_rows=rows.cu_rows,
            prefix_len=members.committed[rows.member],
            suffix_start=level.suffix_start,
            block_table=members.block_table[rows.member],
        )
        return self._programs.draft_step(
            *layout.tensors(self._device),
            hidden,
            topk,
            tensor(level.parent_row, self._device),
            tensor(level.rank, self._device),
            *members.draft_inputs(rows.owner, self._device),
            *self._kv.draft,
        )
