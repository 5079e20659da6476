"""Runs contenders prompt by prompt in turn and sums up what they did."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from speccompile.bench.contender import Answer, Contender, Job, Worker


@dataclass(kw_only=True)
class Score:
    """Totals of one contender.  ``same_ids``: prompts whose ids equal those of ``reference`` (if any)."""

    contender: Contender
    load_s: float
    answers: list[Answer] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the wall time of the calls, prompts' reading included."""
        return self.tokens / sum(answer.seconds for answer in self.answers)

    @property
    def acceptance_length(self) -> float:
        """Kept tokens per target call, bonus included, prompts' calls excluded."""
        rounds = sum(answer.rounds for answer in self.answers)
        return sum(answer.round_tokens for answer in self.answers) / rounds if rounds else 0.0

    def ratio(self, other: Score) -> float:
        """Tokens per second over those of ``other``."""
        return self.tokens_per_s / other.tokens_per_s

    def median_ratio(self, other: Score) -> float:
        """Median over prompts of the ratio of the two speeds."""
        pairs = zip(self.answers, other.answers, strict=True)
        return statistics.median(_speed(a) / _speed(b) for a, b in pairs if a.token_ids and b.token_ids)

    def same_ids(self, other: Score) -> int:
        """Number of prompts answered with the same ids."""
        return sum(a.token_ids == b.token_ids for a, b in zip(self.answers, other.answers, strict=True))


def _speed(answer: Answer) -> float:
    return len(answer.token_ids) / answer.seconds


def race(
    contenders: Sequence[Contender],
    jobs: Sequence[Job],
    *,
    eos_ids: list[int],
    threads: int,
    bar: Callable[[Sequence[Job]], Iterable[Job]],
) -> list[Score]:
    """Every contender answers every job; the order rotates from prompt to prompt."""
    warm = Job(prompt_ids=jobs[0].prompt_ids, max_tokens=8)
    first = Job(prompt_ids=jobs[0].prompt_ids[:8], max_tokens=1)
    workers = [Worker(c, eos_ids=eos_ids, threads=threads, first=first) for c in contenders]
    scores = [Score(contender=w.contender, load_s=w.load_s) for w in workers]
    for worker in workers:
        worker.answer(warm)
    for number, job in enumerate(bar(jobs)):
        for place in range(len(workers)):
            turn = (place + number) % len(workers)
            scores[turn].answers.append(workers[turn].answer(job))
    for worker, score in zip(workers, scores, strict=True):
        score.peak_memory = worker.close()
    return scores
