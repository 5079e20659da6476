"""Counters of requests and sessions, and the record a finished request returns.

Acceptance length is the number of tokens emitted per target call (accepted drafts + bonus).  Here it
counts *kept* tokens only (nothing after a stop or past ``max_tokens``) and only calls that verify:
the prompt's calls, and the first token, which comes out of them, belong to ``ttft_s``.  Plain
decoding therefore has acceptance length 1 exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from speccompile.runtime.output import FinishReason


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request.

    rounds: target calls after the prompt's.  acceptance_length: kept tokens per round (0.0 without
    rounds).  acceptance_by_depth[d - 1]: share of the rounds in which at least d drafts were accepted
    and kept.  ttft_s: submission to first token.  tpot_s: mean seconds per token after the first.
    tokens_per_s: tokens over the time from submission to the end.  Times are 0.0 where undefined.
    seed: the seed that draws this text again.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    acceptance_length: float
    acceptance_by_depth: list[float]
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    seed: int


@dataclass
class RoundCounts:
    """Rounds and what they kept.  ``reached[d - 1]`` counts rounds that kept at least d accepted drafts."""

    rounds: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)

    def add(self, *, kept: int, accepted: int) -> None:
        """One round of one request: ``kept`` tokens, ``accepted`` of them drafts."""
        self.rounds += 1
        self.tokens += kept
        self.reached += [0] * (accepted - len(self.reached))
        for depth in range(accepted):
            self.reached[depth] += 1

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [count / self.rounds for count in self.reached]


@dataclass
class SessionStats:
    """Totals since the session began; seconds are host wall time.

    ``step_s - program_s`` is the host's own work; it is meaningful where programs run synchronously
    (CPU).  ``counts`` has one round per request and target call.
    """

    counts: RoundCounts = field(default_factory=RoundCounts)
    steps: int = 0
    step_s: float = 0.0
    program_s: float = 0.0

    @property
    def host_share(self) -> float:
        """Part of the step time spent outside the programs."""
        return 1.0 - self.program_s / self.step_s if self.step_s else 0.0


@dataclass
class Clock:
    """Times of one request, ``time.perf_counter`` seconds."""

    submitted: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0

    def mark(self) -> None:
        """A round kept tokens just now."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last

    def ttft_s(self) -> float:
        return 0.0 if self.first is None else self.first - self.submitted

    def tpot_s(self, tokens: int) -> float:
        return 0.0 if self.first is None or tokens < 2 else (self.last - self.first) / (tokens - 1)

    def tokens_per_s(self, tokens: int) -> float:
        return 0.0 if self.first is None else tokens / (self.last - self.submitted)
