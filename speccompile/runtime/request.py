"""One request: what was asked, what is kept, and how far target and head have read it.

``tokens`` are prompt and kept tokens.  Of these, ``committed`` have their KV in the target's cache.
A decoding request has one token more than that, the root of its next round.  ``pending`` are the
target feature rows of the last call that the head has not read yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speccompile.runtime.forest import Array
from speccompile.runtime.output import Output
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Clock, Completion, RoundCounts
from speccompile.tree.named import OFF
from speccompile.tree.tree import Int64, Tree


@dataclass(frozen=True)
class Pending:
    """Feature rows, indices into the last ``target_step`` output, of positions from ``start`` on."""

    start: int
    rows: Int64


@dataclass(kw_only=True, eq=False)
class Request:
    """State of one request; ``max_new`` is ``max_tokens`` capped by the room that ``max_seq_len`` leaves."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    tree: Tree
    max_new: int
    max_seq_len: int
    output: Output
    tokens: list[int] = field(init=False)
    committed: int = 0
    pending: Pending | None = None
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
        return min(len(self.prompt) + self.max_new + self.tree.rows, self.max_seq_len)

    def round_tree(self) -> Tree:
        """This round's tree: no slot at or past ``max_seq_len``, no draft that could not be kept."""
        left = self.max_new - len(self.output.token_ids)
        tree = self.tree.trimmed(self.max_seq_len - self.committed - 1, left - 1)
        return tree if tree.num_nodes else OFF

    def pending_tokens(self) -> list[int]:
        """For each pending feature of position i, token i + 1."""
        assert self.pending is not None
        first = self.pending.start + 1
        return self.tokens[first : first + len(self.pending.rows)]

    def commit(self, rows: Int64) -> None:
        """The target has read ``len(rows)`` more tokens; their features are at ``rows`` of its output."""
        self.pending = Pending(self.committed, rows) if self.tree.num_nodes else None
        self.committed += len(rows)

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
