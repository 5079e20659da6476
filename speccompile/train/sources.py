"""From training rows to rollouts in a cache: what ``speccompile rollout`` does.

With ``answers="target"`` the target answers every conversation's last user turn itself (and the earlier turns
stay as context); with ``answers="given"`` the texts of the data are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import ConfigError
from speccompile.model.llama import Llama
from speccompile.train.cache import CacheError, Rollout, write_shard
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.rollout import Generator, Prompt, RolloutConfig, given_texts
from speccompile.train.rows import Row, read_rows

Answers = Literal["target", "given"]
_SHARD_TOKENS = 40_000


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


def make_prompt(row: Row, tokenizer: Tokenizer, frame: ChatFrame | None) -> Prompt:
    """The row up to and including the generation prompt of its last answer, with its follow-ups.

    A text without the template's generation prompt is taken whole: the target continues it.
    """
    if row.text is None:
        messages = list(row.messages)
        ids = tokenizer.encode_chat(messages if messages[-1]["role"] == "user" else messages[:-1])
        more = tuple(tuple(tokenizer.encode(text, add_bos=False)) for text in row.follow_ups)
        return Prompt(tuple(ids), more)
    ids = tokenizer.encode(row.text, add_bos=False)
    width = len(frame.marker) if frame else 0
    ends = [e for e in range(width, len(ids)) if width and tuple(ids[e - width : e]) == frame.marker]  # type: ignore[union-attr]
    return Prompt(tuple(ids[: ends[-1]] if ends else ids))


def write_rollouts(
    target: Llama,
    tokenizer: Tokenizer,
    data: Path,
    output: Path,
    config: RolloutConfig,
    *,
    answers: Answers,
    answer_tokens: int,
    prefix: str,
    say: Callable[[str], None],
    tick: Callable[[int], object],
) -> RolloutSummary:
    """Fills the cache ``output`` until ``answer_tokens`` are there (``given``: or the data end).

    ``say`` gets lines for the user, ``tick`` the number of answer tokens as they come.
    """
    rows, report = read_rows(data)
    for line in report.lines():
        say(f"{data}: {line}")
    writer = ShardWriter(output, prefix, {"format": "speccompile-rollouts-1", "seed": str(config.seed)})
    if answers == "given":
        _write_given(target, tokenizer, rows, config, writer, answer_tokens, say, tick)
    else:
        framed = config.own_prompts or config.second_turns or any(row.follow_ups for row in rows)
        frame = ChatFrame.of(tokenizer) if framed else None
        prompts = [make_prompt(row, tokenizer, frame) for row in rows]
        generator = Generator(target, frame, prompts, config)
        while writer.answer_tokens < answer_tokens:
            before = writer.answer_tokens
            for rollout in generator.wave():
                writer.add(rollout)
            tick(writer.answer_tokens - before)
    writer.flush()
    if not writer.answer_tokens:
        raise CacheError(
            f"{data}: 0 supervised tokens in 100% of {len(rows)} rows: the texts do not hold the generation "
            f"prompt of the target's chat template followed by an answer"
        )
    return writer.summary()


def _write_given(
    target: Llama,
    tokenizer: Tokenizer,
    rows: list[Row],
    config: RolloutConfig,
    writer: ShardWriter,
    answer_tokens: int,
    say: Callable[[str], None],
    tick: Callable[[int], object],
) -> None:
    frame = ChatFrame.of(tokenizer)
    texts = []
    for row in rows:
        if row.text is not None:
            ids = tokenizer.encode(row.text, add_bos=False)
        else:
            ids = tokenizer.encode_chat(list(row.messages), add_generation_prompt=False)
        mask = frame.answer_mask(torch.tensor(ids))
        texts.append((torch.tensor(ids), mask))
    answered = [(ids, mask) for ids, mask in texts if mask.any()]
    if empty := len(texts) - len(answered):
        say(f"0 supervised tokens in {empty} of {len(texts)} rows: no answer after a generation prompt")
    for rollout in given_texts(target, answered, config):
        writer.add(rollout)
        tick(int(rollout.answer.sum()))
        if writer.answer_tokens >= answer_tokens:
            break


def refuse_filled(output: Path, prefix: str) -> None:
    """ConfigError when the cache already holds shards of this prefix: the same seed would repeat them."""
    if any(output.glob(f"{prefix}-*.safetensors")):
        raise ConfigError(
            f"{output}: already holds shards {prefix}-*; choose another --seed or output folder"
        )
