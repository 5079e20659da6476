"""From training rows to rollouts in a cache: what ``speccompile rollout`` does.

With ``answers="target"`` the target answers every conversation's last user turn itself (and the earlier turns
stay as context); with ``answers="given"`` the texts of the data are read as they are.  Answers with their
end-of-turn ids are marked, nothing else; a shard says which target its features belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import ConfigError
from speccompile.model.llama import Llama
from speccompile.train.cache import CacheError, Rollout, write_shard
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.feature_cache import TextFeatures
from speccompile.train.features import run_target, target_digest
from speccompile.train.rollout import Generator
from speccompile.train.rollout_program import make_program
from speccompile.train.row_ids import each_row, make_prompt, make_text
from speccompile.train.rows import Row, RowReport, read_rows
from speccompile.train.talk import Prompt, RolloutConfig

Answers = Literal["target", "given"]
_SHARD_TOKENS = 40_000
_READ_TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """What was written: shards, sequences, tokens and answer tokens."""

    shards: int
    sequences: int
    tokens: int
    answer_tokens: int


class ShardWriter:
    """Collects rollouts and writes a shard whenever enough tokens are there."""

    def __init__(self, folder: Path, prefix: str, metadata: dict[str, str]) -> None:
        self._folder, self._prefix, self._metadata = folder, prefix, metadata
        self._pending: list[Rollout] = []
        self.shards = self.sequences = self.tokens = self.answer_tokens = 0

    def add(self, rollout: Rollout) -> None:
        self._pending.append(rollout)
        self.sequences += 1
        self.tokens += len(rollout.ids)
        self.answer_tokens += int(rollout.answer.sum())
        if sum(len(r.ids) for r in self._pending) >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; names continue after the shards that are there."""
        if not self._pending:
            return
        taken = {p.stem for p in self._folder.glob(f"{self._prefix}-*.safetensors")}
        number = next(n for n in range(len(taken) + 1) if f"{self._prefix}-{n:04d}" not in taken)
        write_shard(self._folder, f"{self._prefix}-{number:04d}", self._pending, self._metadata)
        self._pending = []
        self.shards += 1

    def summary(self) -> RolloutSummary:
        return RolloutSummary(
            shards=self.shards,
            sequences=self.sequences,
            tokens=self.tokens,
            answer_tokens=self.answer_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """What to roll out (``data``, until ``answer_tokens`` are there or prompts asked once or given data end),
    and where to.

    ``say`` gets lines for the user, ``tick`` the number of answer tokens as they come.
    """

    data: Path
    output: Path
    answers: Answers
    answer_tokens: int | None
    prefix: str
    say: Callable[[str], None]
    tick: Callable[[int], object]


def write_rollouts(
    target: Llama, tokenizer: Tokenizer, config: RolloutConfig, job: RolloutJob
) -> RolloutSummary:
    """Fills the cache ``job.output``; whole shards are kept when something stops it.

    Raises CacheError when no row gives a supervised token.
    """
    rows, report = read_rows(job.data)
    layers = config.stored_layers(target.config.num_hidden_layers)
    notes = {"target": target_digest(target), "aux_layers": ",".join(map(str, layers))}
    writer = ShardWriter(
        job.output, job.prefix, {"format": "speccompile-rollouts-1", "seed": str(config.seed), **notes}
    )
    roll = _given if job.answers == "given" else _answered
    try:
        for rollout in roll(target, tokenizer, config, job, rows, report):
            writer.add(rollout)
            job.tick(int(rollout.answer.sum()))
    finally:
        writer.flush()
    return writer.summary()


def _tell(job: RolloutJob, report: RowReport) -> None:
    for line in report.lines():
        job.say(f"{job.data}: {line}")


def _answered(
    target: Llama, tokenizer: Tokenizer, config: RolloutConfig, job: RolloutJob, rows: list[Row],
    report: RowReport,
) -> Iterator[Rollout]:  # fmt: skip
    """The target answers."""
    framed = config.own_prompts or config.second_turns or any(row.follow_ups or row.text for row in rows)
    frame = ChatFrame.of(tokenizer) if framed and tokenizer.has_chat_template else None
    prompts = each_row(rows, lambda row: make_prompt(row, tokenizer, frame), report)
    _tell(job, report)
    if not prompts:
        raise ConfigError(f"{job.data}: no usable rows: the chat template refuses all of them")
    program = make_program(target, config, _most_tokens(prompts, config, job), job.output, job.say)
    generator = Generator(target, frame, prompts, config, program)
    if generator.skipped_prompts:
        job.say(f"skipped {generator.skipped_prompts} prompts: longer than max_length {config.max_length}")
    yield from generator.rollouts(job.answer_tokens)
    if generator.dropped:
        job.say(f"dropped {generator.dropped} conversations that ended before an answer began")


def _most_tokens(prompts: list[Prompt], config: RolloutConfig, job: RolloutJob) -> int:
    """About how many answer tokens there can be."""
    wanted = [] if job.answer_tokens is None else [job.answer_tokens]
    if config.once:
        wanted.append(sum(1 + len(p.follow_ups) for p in prompts) * config.max_answer)
    return min(wanted, default=sys.maxsize)


def _given(
    target: Llama, tokenizer: Tokenizer, config: RolloutConfig, job: RolloutJob, rows: list[Row],
    report: RowReport,
) -> Iterator[Rollout]:  # fmt: skip
    """The answers of the data, read by the target if its features are to be stored."""
    frame = ChatFrame.of(tokenizer)
    texts = each_row(rows, lambda row: make_text(row, tokenizer, frame), report)
    _tell(job, report)
    cut = [(ids[: config.max_length], mask[: config.max_length]) for ids, mask in texts]
    answered = [(ids, mask) for ids, mask in cut if mask.any()]
    empty = len(cut) - len(answered)
    if empty or not cut:
        share = f"0 supervised tokens in {100 * empty / max(1, len(cut)):.0f}% of {len(cut)} rows"
        reason = "no answer after the generation prompt of the target's chat template"
        if not answered:
            raise CacheError(f"{job.data}: {share}: {reason}")
        job.say(f"{share} ({empty}): {reason}; they are left out")
    layers = config.stored_layers(target.config.num_hidden_layers)
    total = 0
    for first in range(0, len(answered), _READ_TOGETHER):
        part = answered[first : first + _READ_TOGETHER]
        features: list[TextFeatures] = []
        if config.features != "none":
            features = run_target(target, [ids[:-1] for ids, _ in part], layers)
        for i, (ids, mask) in enumerate(part):
            stored = (features[i].hidden, features[i].aux if layers else None) if features else ()
            yield Rollout(ids, mask, *stored)
            total += int(mask.sum())
            if job.answer_tokens is not None and total >= job.answer_tokens:
                return


def refuse_filled(output: Path, prefix: str) -> None:
    """ConfigError when the cache already holds shards of this prefix: the same seed would repeat them."""
    if any(output.glob(f"{prefix}-*.safetensors")):
        raise ConfigError(
            f"{output}: already holds shards {prefix}-*; choose another --seed or output folder"
        )
