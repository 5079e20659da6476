"""The draft phase of a round: the head catches up with the target, then proposes, depth by depth."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speccompile.runtime.batch import CausalLayouts, Layout, tensor
from speccompile.runtime.forest import ForestLevel
from speccompile.runtime.members import Members
from speccompile.runtime.programs import KvCache, ProgramSet
from speccompile.runtime.request import Pending
from speccompile.tree.tree import Int64


class Drafter:
    """Calls ``draft_extend`` and ``draft_step``.

    The pair (feature of position i, token i + 1) has slot i and position i.  After ``draft_extend``
    the head has read the pairs 0 .. L-1, L being the target's committed length, so the fed nodes of
    depth d take position L + d - 1 and suffix slots from L.
    """

    def __init__(self, programs: ProgramSet, kv: KvCache, causal: CausalLayouts) -> None:
        self._programs, self._kv, self._causal = programs, kv, causal
        self._device, self._max_rows = programs.device, programs.limits.max_rows

    def propose(self, members: Members) -> list[Tensor]:
        """Candidates [rows, K] of each draft call, as ``Forest.token_source`` counts them."""
        if not len(members.readers):
            return []
        self._catch_up(members)
        readers = [members.requests[i] for i in members.readers]
        hidden, topk = self._read(members, members.readers, [request.num_pending for request in readers])
        candidates = [topk[: len(members.forest.drafting)]]
        for level in members.forest.levels:
            hidden, topk = self._step(members, level, hidden, topk)
            candidates.append(topk)
        return candidates

    def _catch_up(self, members: Members) -> None:
        """Reads what is too much for one call, oldest first; every reader keeps its latest positions."""
        readers = [(i, members.requests[i]) for i in members.readers]
        if sum(request.num_pending for _, request in readers) <= self._max_rows:
            return
        for index, request in readers:
            while (excess := request.num_pending - self._max_rows // len(readers)) > 0:
                length = min(excess, self._max_rows)
                self._read(members, np.array([index], np.int64), [length])
                request.forget_pending(request.pending[0].start + length)

    def _read(self, members: Members, who: Int64, lengths: list[int]) -> tuple[Tensor, ...]:
        """``draft_extend`` over the oldest ``lengths`` pending positions of each request of ``who``."""
        assert self._programs.draft_extend is not None
        starts = [members.requests[i].pending[0].start for i in who]
        layout = self._causal.make(
            start=np.array(starts, np.int64),
            length=np.array(lengths, np.int64),
            block_table=members.block_table[who],
        )
        parts: list[Pending] = []
        tokens: list[int] = []
        for i, start, length in zip(who, starts, lengths, strict=True):
            request = members.requests[i]
            parts += (
                item.part(start, start + length) for item in request.pending if item.start < start + length
            )
            tokens += request.tokens[start + 1 : start + 1 + length]
        feature, feature_row = _features(parts)
        return self._programs.draft_extend(
            tensor(np.array(tokens, np.int64), self._device),
            *layout.tensors(self._device),
            feature,
            tensor(feature_row, self._device),
            tensor(layout.cu_rows[1:].astype(np.int64) - 1, self._device),
            *members.draft_inputs(who, self._device),
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


def _features(parts: list[Pending]) -> tuple[Tensor, Int64]:
    """One tensor that holds the features of all parts, and the row of each position."""
    first, rows = parts[0].feature, np.concatenate([part.rows for part in parts])
    if all(part.feature is first for part in parts):
        return first, rows
    gathered = [part.feature[tensor(part.rows, part.feature.device)] for part in parts]
    return torch.cat(gathered), np.arange(len(rows), dtype=np.int64)
