"""The second half of a round: the target scores trees and prompt chunks, ``accept`` draws and walks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speccompile.runtime.batch import CausalLayouts, Layout, joined, tensor
from speccompile.runtime.members import Members
from speccompile.runtime.programs import KvCache, ProgramSet
from speccompile.runtime.request import Request
from speccompile.tree.tree import Int64


@dataclass(frozen=True)
class Walk:
    """What the target read of one request, as rows of the call in text order, and the tokens drawn.

    A decoding request draws one token per row of its accepted path; a prompt chunk draws one after
    its last row if the prompt ends there, else none.
    """

    request: Request
    rows: Int64
    drawn: list[int]


class Verifier:
    """Calls ``target_step`` and ``accept``."""

    def __init__(self, programs: ProgramSet, kv: KvCache, causal: CausalLayouts) -> None:
        self._programs, self._kv, self._causal = programs, kv, causal
        self._device, self._min_rows = programs.device, programs.limits.min_target_rows

    def verify(self, members: Members, candidates: list[Tensor]) -> tuple[list[Walk], Tensor]:
        """One walk per member and the features of all rows of the call."""
        layout = self._layout(members).padded(self._min_rows)
        logit_row = self._logit_row(members)
        token = self._token(members, candidates, len(layout.position))
        logits, feature = self._programs.target_step(
            token, *layout.tensors(self._device), tensor(logit_row, self._device), *self._kv.target
        )
        if not len(members.drawing):
            nothing = np.zeros(0, np.int64)
            return self._walks(members, nothing, nothing, nothing), feature
        drawn, path, path_len = self._accept(members, layout, logit_row, token, logits)
        return self._walks(members, drawn, path, path_len), feature

    def _layout(self, members: Members) -> Layout:
        rows, trees = members.forest.rows, len(members.decoding)
        layout = Layout(
            position=members.committed[rows.owner] + members.forest.depth,
            mask=rows.mask,
            cu_rows=rows.cu_rows,
            prefix_len=members.committed[:trees],
            suffix_start=np.zeros(trees, np.int32),
            block_table=members.block_table[:trees],
        )
        if not members.chunks:
            return layout
        chunks = self._causal.make(
            start=members.committed[trees:],
            length=np.diff(members.chunk_cu_rows),
            block_table=members.block_table[trees:],
        )
        return joined(layout, chunks)

    def _logit_row(self, members: Members) -> Int64:
        """Rows to score: all tree rows, the last row of each prompt, and row 0 again as padding."""
        ends = [
            members.chunk_cu_rows[c + 1] - 1 for c, chunk in enumerate(members.chunks) if chunk.ends_prompt
        ]
        num_tree_rows = int(members.forest.rows.cu_rows[-1])
        rows = np.zeros(max(self._min_rows, num_tree_rows + len(ends)), np.int64)
        rows[:num_tree_rows] = np.arange(num_tree_rows)
        rows[num_tree_rows : num_tree_rows + len(ends)] = ends
        return rows

    def _token(self, members: Members, candidates: list[Tensor], num_rows: int) -> Tensor:
        roots = np.array([request.tokens[-1] for request in members.decoding], np.int64)
        drafted = torch.cat([tensor(roots, self._device), *(topk.reshape(-1) for topk in candidates)])
        parts = [drafted[tensor(members.forest.token_source, self._device)]]
        for chunk in members.chunks:
            request = chunk.request
            ids = request.prompt[request.committed : request.committed + chunk.length]
            parts.append(torch.tensor(ids, dtype=torch.int64, device=self._device))
        padding = num_rows - sum(map(len, parts))
        return torch.cat([*parts, torch.zeros(padding, dtype=torch.int64, device=self._device)])

    def _accept(
        self, members: Members, layout: Layout, logit_row: Int64, token: Tensor, logits: Tensor
    ) -> tuple[Int64, Int64, Int64]:
        """``drawn`` [N], ``path`` [R, P], ``path_len`` [R] on the host, by one transfer."""
        forest, trees = members.forest, len(members.decoding)
        ends = len(members.drawing) - trees
        position = layout.position[logit_row]
        singles = forest.rows.cu_rows[-1] + np.arange(1, ends + 1, dtype=np.int32)
        no_parent = np.full(len(logit_row) - len(forest.parent), -1, np.int64)
        drawn, path, path_len = self._programs.accept(
            logits,
            token[tensor(logit_row, self._device)],
            tensor(np.concatenate([forest.parent, no_parent]), self._device),
            tensor(position, self._device),
            tensor(np.concatenate([forest.rows.cu_rows, singles]), self._device),
            tensor(self._root_slot(members, position), self._device),
            tensor(members.block_table[members.drawing], self._device),
            *members.accept_inputs(self._device),
            *self._kv.target,
        )
        packed = torch.cat([drawn, path.reshape(-1), path_len]).cpu().numpy()
        rows, walks = len(logit_row), len(members.drawing)
        return packed[:rows], packed[rows:-walks].reshape(walks, -1), packed[-walks:]

    @staticmethod
    def _root_slot(members: Members, position: Int64) -> Int64:
        """i32 [R] slot of the first row of each drawing request; a prompt's only row is its last token."""
        trees, tree_rows = len(members.decoding), members.forest.rows.cu_rows[-1]
        ends = position[tree_rows : tree_rows + len(members.drawing) - trees]
        return np.concatenate([members.committed[:trees], ends]).astype(np.int32)

    @staticmethod
    def _walks(members: Members, drawn: Int64, path: Int64, path_len: Int64) -> list[Walk]:
        walks = []
        for request, rows, length in zip(members.decoding, path, path_len, strict=False):
            walks.append(Walk(request, rows[:length], drawn[rows[:length]].tolist()))
        ends = iter(drawn[members.forest.rows.cu_rows[-1] :].tolist())
        for c, chunk in enumerate(members.chunks):
            rows = np.arange(*members.chunk_cu_rows[c : c + 2], dtype=np.int64)
            walks.append(Walk(chunk.request, rows, [next(ends)] if chunk.ends_prompt else []))
        return walks
