"""Rank vectors of a text by the programs of an engine: what any tree would accept, measured once.

A draft's state depends on its own path alone.  So for every token of an answer that could be the root of a
round, the head is led along the true tokens after it, and each gets its rank among the candidates that the
engine offers there; a path ends where the true token is no candidate.  All roots of a stretch share one
``draft_step`` call per depth: they are one request to the program, whose mask shows each root its own past.
Legend: N roots, D depths, K candidates, h head width, G roots of one stretch, S suffix slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speccompile.runtime.batch import CausalLayouts, Layout, tensor
from speccompile.runtime.programs import KvCache, ProgramSet
from speccompile.tree.replay import NOT_DRAFTED, RankTable
from speccompile.tree.tree import Int64

_STRETCH = 64


@dataclass(frozen=True, kw_only=True)
class Text:
    """``tokens`` of a prompt and its answer, which begins at ``first`` (at least 1), and how it was drawn."""

    tokens: Sequence[int]
    first: int
    temperature: float = 0.0
    seed: int = 0


class Ranker:
    """Ranks texts to ``depth``; uses the KV blocks from 1 on, so no request may be running."""

    def __init__(self, programs: ProgramSet, kv: KvCache, *, depth: int) -> None:
        assert programs.has_head and 1 <= depth <= programs.limits.max_tree_depth
        self._programs, self._kv, self._depth = programs, kv, depth
        self._limits, self._device = programs.limits, programs.device
        self._causal = CausalLayouts(programs.limits.max_rows)
        self._block_table = np.arange(1, programs.limits.blocks_per_request + 1, dtype=np.int32)[None]

    def rank(self, text: Text) -> RankTable:
        """The table of one text; row n is the round whose root is answer token n.

        The last token is no root: nothing follows it.  An answer of one token gives no rows.
        """
        roots = np.arange(text.first, len(text.tokens) - 1, dtype=np.int32)
        rank_ND = np.full((len(roots), self._depth), NOT_DRAFTED, np.uint8)
        if len(roots):
            hidden_Nh, topk_NK = self._read(text)
            rank_ND[:, 0] = _found(topk_NK, np.array(text.tokens, np.int64)[roots + 1])
            end = len(roots)
            while end and self._depth > 1:
                start = max(0, end - self._stretch(text.first + end))
                part = slice(start, end)
                self._follow(text, text.first + start, hidden_Nh[part], topk_NK[part], rank_ND[part])
                end = start
        return RankTable(rank_ND, (len(text.tokens) - 1 - roots).astype(np.int32), roots)

    def _stretch(self, end: int) -> int:
        """Roots in one stretch that ends at position ``end``: its drafts lie behind it, in slots and mask."""
        free = (self._limits.max_seq_len - end) // (self._depth - 1)
        return max(1, min(_STRETCH, self._limits.max_rows // self._depth, free))

    def _read(self, text: Text) -> tuple[Tensor, Tensor]:
        """Target and head read the text up to its last root; ``hidden`` [N, h] and ``topk`` [N, K] there."""
        pairs, max_rows = len(text.tokens) - 2, self._limits.max_rows
        outputs = []
        for start in range(0, pairs, max_rows):
            length = min(max_rows, pairs - start)
            layout = self._causal.make(np.array([start]), np.array([length]), self._block_table)
            feature = self._target(text.tokens[start : start + length], layout)
            # The pair before a root, the feature of root - 1 with the root itself, scores its children.
            wanted = min(length, max(0, start + length - text.first + 1))
            out_row = np.arange(length - max(1, wanted), length, dtype=np.int64)
            hidden, topk = self._extend(text, start, layout, feature, out_row)
            outputs.append((hidden[len(out_row) - wanted :], topk[len(out_row) - wanted :]))
        hidden_Nh, topk_NK = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return hidden_Nh, topk_NK

    def _target(self, token: Sequence[int], layout: Layout) -> Tensor:
        """Features of consecutive tokens, [rows, F]."""
        layout = layout.padded(self._limits.min_target_rows)
        padded = np.zeros(len(layout.position), np.int64)
        padded[: len(token)] = token
        unused = np.zeros(self._limits.min_target_rows, np.int64)
        _, feature = self._programs.target_step(
            self._tensor(padded), *layout.tensors(self._device), self._tensor(unused), *self._kv.target
        )
        return feature

    def _extend(
        self, text: Text, start: int, layout: Layout, feature: Tensor, out_row: Int64
    ) -> tuple[Tensor, ...]:
        length = len(layout.position)
        assert self._programs.draft_extend is not None
        return self._programs.draft_extend(
            self._tensor(np.array(text.tokens[start + 1 : start + 1 + length], np.int64)),
            *layout.tensors(self._device),
            feature,
            self._tensor(np.arange(length, dtype=np.int64)),
            self._tensor(out_row),
            *self._law(text, len(out_row)),
            *self._kv.draft,
        )

    def _follow(
        self, text: Text, base: int, hidden: Tensor, topk: Tensor, rank_GD: NDArray[np.uint8]
    ) -> None:
        """Fill depths 2 .. D of the stretch of roots from position ``base`` on.

        Root g sees the prefix of ``base`` slots and, of the suffix, the g true pairs before it and its own
        drafts.  These are written behind the stretch, so stretches must be taken from the last to the first.
        """
        roots = len(rank_GD)
        token = np.array(text.tokens, np.int64)
        visible_GS = np.zeros((roots, 64 * self._limits.mask_words), np.bool_)
        visible_GS[:, :roots] = np.tri(roots, k=-1, dtype=np.bool_)
        written, row_of_G = roots, np.arange(roots)
        for depth in range(1, self._depth):
            room = base + np.arange(roots) + depth + 1 < len(text.tokens)
            alive = np.flatnonzero((rank_GD[:, depth - 1] != NOT_DRAFTED) & room)
            if not len(alive):
                return
            visible_GS[alive, written + np.arange(len(alive))] = True
            hidden, topk = self._step(
                text, base, alive + (depth - 1), visible_GS[alive], written,
                (hidden, topk, row_of_G[alive], rank_GD[alive, depth - 1].astype(np.int64)),
            )  # fmt: skip
            rank_GD[alive, depth] = _found(topk, token[base + alive + depth + 1])
            row_of_G[alive] = np.arange(len(alive))
            written += len(alive)

    def _step(
        self,
        text: Text,
        base: int,
        offset: Int64,
        visible: NDArray[np.bool_],
        written: int,
        parent: tuple[Tensor, Tensor, Int64, Int64],
    ) -> tuple[Tensor, ...]:
        """One ``draft_step``; ``parent`` are hidden, topk, parent_row and rank of the contract."""
        hidden, topk, parent_row, rank = parent
        layout = Layout(
            position=base + offset,
            mask=np.packbits(visible, axis=1, bitorder="little").view(np.int64),
            cu_rows=np.array([0, len(offset)], np.int32),
            prefix_len=np.array([base], np.int32),
            suffix_start=np.array([written], np.int32),
            block_table=self._block_table,
        )
        assert self._programs.draft_step is not None
        return self._programs.draft_step(
            *layout.tensors(self._device),
            hidden,
            topk,
            self._tensor(parent_row),
            self._tensor(rank),
            *self._law(text, len(offset)),
            *self._kv.draft,
        )

    def _law(self, text: Text, rows: int) -> list[Tensor]:
        return [
            self._tensor(np.full(rows, text.temperature, np.float32)),
            self._tensor(np.full(rows, text.seed, np.int64)),
        ]

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return tensor(array, self._device)


def _found(topk_NK: Tensor, true_N: Int64) -> NDArray[np.uint8]:
    """Rank of each true token among the candidates; NOT_DRAFTED where it is none."""
    same = topk_NK.cpu().numpy() == true_N[:, None]
    return np.where(same.any(1), same.argmax(1), NOT_DRAFTED).astype(np.uint8)
