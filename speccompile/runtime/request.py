"""One request: what was asked, what is kept, and how far target and head have read it.

``tokens`` are prompt and kept tokens.  Of these, ``committed`` have their KV in the target's cache.
A decoding request has one token more than that, the root of its next round.  ``pending`` are target
features that the head has not read yet: those of the last call while it drafts, and of all calls since it
last drafted while the tree table says ``off``.  They are kept, not read, because reading costs a program
call a round and plain decoding must not pay for drafts it does not use; the head catches up in a few wide
calls when its next draft is wanted, and then has read every position once, as if it had drafted throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from speccompile.runtime.forest import Array
from speccompile.runtime.output import Output
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Clock, Completion, RoundCounts
from speccompile.tree.named import OFF
from speccompile.tree.table import TreeTable
from speccompile.tree.tree import Int64, Tree


@dataclass(frozen=True)
class Pending:
    """Features of the positions from ``start`` on: ``rows`` of ``feature`` [S, F], from ``target_step``."""

    start: int
    rows: Int64
    feature: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def part(self, start: int, end: int) -> Pending:
        """The positions among ``start`` .. ``end - 1``; may be empty."""
        first, last = max(start, self.start), min(end, self.end)
        return Pending(first, self.rows[first - self.start : max(first, last) - self.start], self.feature)


@dataclass(kw_only=True, eq=False)
class Request:
    """State of one request; ``max_new`` is ``max_tokens`` capped by the room that ``max_seq_len`` leaves."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    trees: TreeTable
    max_new: int
    max_seq_len: int
    output: Output
    tokens: list[int] = field(init=False)
    committed: int = 0
    pending: list[Pending] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    block_row: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: RoundCounts = field(default_factory=RoundCounts)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def done(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that the target has not read."""
        return max(0, len(self.prompt) - self.committed)

    @property
    def slots_needed(self) -> int:
        """KV slots that the request can ever use: prompt, new tokens and the suffix of a round."""
        return min(len(self.prompt) + self.max_new + self.trees.max_rows, self.max_seq_len)

    def round_tree(self, tree: Tree) -> Tree:
        """``tree`` for this round: no slot at or past ``max_seq_len``, no draft that could not be kept."""
        left = self.max_new - len(self.output.token_ids)
        tree = tree.trimmed(self.max_seq_len - self.committed - 1, left - 1)
        return tree if tree.num_nodes else OFF

    @property
    def num_pending(self) -> int:
        """Positions that the head has not read; they end at ``committed``."""
        return self.committed - self.pending[0].start if self.pending else 0

    def commit(self, rows: Int64, feature: Tensor, *, head_read: bool) -> None:
        """The target has read ``len(rows)`` more tokens; their features are at ``rows`` of ``feature``.

        ``head_read``: the head has read everything that was pending.
        """
        if head_read:
            self.pending.clear()
        if self.trees.speculates:
            self.pending.append(Pending(self.committed, rows, feature))
        self.committed += len(rows)

    def forget_pending(self, start: int) -> None:
        """The head has read the positions before ``start``."""
        self.pending = [item.part(start, item.end) for item in self.pending if item.end > start]

    def keep(self, drawn: Sequence[int]) -> int:
        """Keep the tokens of one walk until the output ends; returns how many were kept."""
        kept = 0
        for token in drawn:
            if self.done:
                break
            self.tokens.append(token)
            self.output.push(token)
            kept += 1
        self.clock.mark()
        return kept

    def completion(self) -> Completion:
        """The result record; only once ``done``."""
        assert self.output.finish_reason is not None
        count = len(self.output.token_ids)
        return Completion(
            text=self.output.text,
            token_ids=list(self.output.token_ids),
            finish_reason=self.output.finish_reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=count,
            rounds=self.counts.rounds,
            acceptance_length=self.counts.acceptance_length,
            acceptance_by_depth=self.counts.acceptance_by_depth,
            ttft_s=self.clock.ttft_s(),
            tpot_s=self.clock.tpot_s(count),
            tokens_per_s=self.clock.tokens_per_s(count),
            seed=self.seed,
        )
