"""Rollouts: the target answers prompts, writes prompts of its own, and its features are kept.

This is the data side of online distillation: a head is trained on texts that the target itself decodes, at
several temperatures, because those are the texts it will draft for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speccompile.errors import ConfigError
from speccompile.model.llama import Llama
from speccompile.train.cache import Rollout
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.config import option
from speccompile.train.dense_cache import DenseCache

_PREFILL_ROWS = 16
_COMPACT_BELOW = 0.85
_MIN_USER_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are made.  Lengths are in tokens; ``aux_layers`` are input-of-layer ids."""

    batch_size: int = option(128, "Conversations decoded together.")
    max_answer: int = option(256, "Longest answer.")
    max_user: int = option(100, "Longest user turn that the target writes itself.")
    max_length: int = option(640, "Longest conversation; longer prompts are skipped.")
    own_prompts: float = option(0.25, "Share of conversations whose user turn the target writes.")
    second_turns: float = option(0.25, "Chance that the target also asks and answers a follow-up.")
    temperatures: tuple[float, ...] = option((0.0, 0.0, 0.7, 1.0), "Each conversation draws one of these.")
    aux_layers: tuple[int, ...] = option((), "Layers whose inputs are stored too (for EAGLE-3 heads).")
    seed: int = option(0, "Seed of choices and sampling.")

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_answer", "max_user", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("own_prompts", "second_turns"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be between 0 and 1")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("temperatures: at least one, none negative")


@dataclass(frozen=True)
class Prompt:
    """Ids up to and including the generation prompt, and the ids of user texts to ask after the answers."""

    ids: tuple[int, ...]
    follow_ups: tuple[tuple[int, ...], ...] = ()


@dataclass
class _Talk:
    """One conversation in the making: turn by turn, either forced ids or what the target decodes."""

    frame: ChatFrame
    config: RolloutConfig
    ids: list[int]
    temperature: float
    answering: bool
    own_follow_up: bool
    given: deque[tuple[int, ...]]
    answer: list[bool] = field(init=False)
    forced: deque[int] = field(default_factory=deque)
    decoded: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        self.answer = [False] * len(self.ids)

    @property
    def sampling_temperature(self) -> float:
        return self.temperature if self.answering else 1.0

    def append(self, drawn: int) -> None:
        """Takes the next token: a forced one of the template if any is left, else the one drawn."""
        if self.forced:
            self.ids.append(self.forced.popleft())
            self.answer.append(False)
        else:
            self.ids.append(drawn)
            self.answer.append(self.answering)
            self.decoded += 1
            self._turn(ended=drawn in self.frame.eos_ids)
        self.finished = self.finished or len(self.ids) >= self.config.max_length

    def _turn(self, ended: bool) -> None:
        if self.answering:
            if ended and self.given:
                frame = self.frame
                self._start(True, (*frame.next_user, *self.given.popleft(), *frame.close, *frame.ask))
            elif ended and self.own_follow_up:
                self._start(False, self.frame.next_user)
            elif ended or self.decoded >= self.config.max_answer:
                self.finished = True
        elif ended and self.decoded >= _MIN_USER_TOKENS:
            self.own_follow_up = self.own_follow_up and not any(self.answer)
            self._start(True, self.frame.ask)
        elif ended or self.decoded >= self.config.max_user:
            self.finished = True

    def _start(self, answering: bool, forced: Sequence[int]) -> None:
        self.answering, self.decoded = answering, 0
        self.forced.extend(forced)


class Generator:
    """Endless rollouts of one target from a list of prompts, which are taken in random order."""

    def __init__(
        self, target: Llama, frame: ChatFrame | None, prompts: Sequence[Prompt], config: RolloutConfig
    ) -> None:
        if frame is None and (config.own_prompts or config.second_turns or not prompts):
            raise ConfigError("own_prompts, second_turns: without a chat template both must be 0")
        if not prompts and config.own_prompts < 1:
            raise ConfigError("no prompts: give some, or let the target write all (own_prompts 1)")
        self.target, self.config = target, config
        self.frame = frame or ChatFrame(
            open=(), close=(), ask=(), next_user=(), marker=(), eos_ids=target.config.eos_token_ids
        )
        self.prompts = [p for p in prompts if len(p.ids) + 2 <= config.max_length]
        if prompts and not self.prompts:
            raise ConfigError(f"max_length {config.max_length}: every prompt is longer")
        self._random = random.Random(config.seed)
        self._noise = torch.Generator().manual_seed(config.seed)
        self._order: list[int] = []

    def wave(self, tick: Callable[[int], None] = lambda _tokens: None) -> list[Rollout]:
        """Decodes one batch to its end; ``tick`` is told the number of tokens of each step."""
        talks = sorted((self._talk() for _ in range(self.config.batch_size)), key=lambda t: len(t.ids))
        cache = DenseCache(self.target, len(talks), self.config.max_length, self.config.aux_layers)
        last = self._prefill(cache, talks)
        done: list[Rollout] = []
        while talks:
            for talk, token in zip(talks, self._draw(last, talks), strict=True):
                if not talk.finished:
                    talk.append(token)
            tick(sum(not t.finished for t in talks))
            talks, last = self._advance(cache, talks, done)
        return done

    def _talk(self) -> _Talk:
        own = not self.prompts or self._random.random() < self.config.own_prompts
        if not own and not self._order:
            self._order = self._random.sample(range(len(self.prompts)), len(self.prompts))
        prompt = Prompt(self.frame.open) if own else self.prompts[self._order.pop()]
        return _Talk(
            frame=self.frame,
            config=self.config,
            ids=list(prompt.ids),
            temperature=self._random.choice(self.config.temperatures),
            answering=not own,
            own_follow_up=self._random.random() < self.config.second_turns,
            given=deque(prompt.follow_ups),
        )

    def _prefill(self, cache: DenseCache, talks: list[_Talk]) -> Tensor:
        """Runs all prompts; returns the hidden that scores the first drawn token of each, [B, h]."""
        out = []
        for first in range(0, len(talks), _PREFILL_ROWS):
            part = talks[first : first + _PREFILL_ROWS]
            width = max(len(t.ids) for t in part)
            token = torch.tensor([t.ids + [0] * (width - len(t.ids)) for t in part])
            position = torch.arange(width).expand(len(part), width)
            hidden = cache.forward(token, position, first)
            out.append(hidden[torch.arange(len(part)), torch.tensor([len(t.ids) - 1 for t in part])])
        return torch.cat(out)

    def _draw(self, last: Tensor, talks: list[_Talk]) -> list[int]:
        logits = self.target.lm_head(last).float()
        temperature = torch.tensor([t.sampling_temperature for t in talks])[:, None]
        greedy = logits.argmax(-1)
        if not temperature.any():
            return greedy.tolist()
        law = torch.softmax(logits / temperature.clamp(min=1e-3), dim=-1)
        sampled = torch.multinomial(law, 1, generator=self._noise)[:, 0]
        return torch.where(temperature[:, 0] > 0, sampled, greedy).tolist()

    def _advance(
        self, cache: DenseCache, talks: list[_Talk], done: list[Rollout]
    ) -> tuple[list[_Talk], Tensor]:
        """Collects finished talks when enough have ended, then runs the newest token of the others.

        Ended talks that still sit in the batch repeat their last position, which changes nothing.
        """
        alive = [i for i, t in enumerate(talks) if not t.finished]
        if len(alive) < _COMPACT_BELOW * len(talks) or not alive:
            for i, talk in enumerate(talks):
                if talk.finished and any(talk.answer):
                    done.append(_rollout(cache, i, talk))
            if not alive:
                return [], torch.empty(0)
            cache.keep(torch.tensor(alive))
            talks = [talks[i] for i in alive]
        # A finished talk's last token was never run: it has no feature.
        behind = [len(t.ids) - (2 if t.finished else 1) for t in talks]
        token = torch.tensor([[t.ids[p]] for t, p in zip(talks, behind, strict=True)])
        return talks, cache.forward(token, torch.tensor(behind)[:, None])[:, 0]


def _rollout(cache: DenseCache, row: int, talk: _Talk) -> Rollout:
    features = len(talk.ids) - 1
    return Rollout(
        ids=torch.tensor(talk.ids),
        answer=torch.tensor(talk.answer),
        hidden=cache.hidden[row, :features].clone(),
        aux=cache.aux[row, :features].clone(),
    )


@torch.no_grad()
def read_text(target: Llama, ids: Tensor, answer: Tensor, aux_layers: tuple[int, ...]) -> Rollout:
    """The features of a given text (answers that the target did not write itself)."""
    cache = DenseCache(target, 1, len(ids), aux_layers)
    cache.forward(ids[None, :-1], torch.arange(len(ids) - 1)[None])
    return Rollout(ids, answer, cache.hidden[0, : len(ids) - 1], cache.aux[0, : len(ids) - 1])


def given_texts(
    target: Llama, texts: Sequence[tuple[Tensor, Tensor]], config: RolloutConfig
) -> Iterator[Rollout]:
    """:func:`read_text` over (ids, answer mask) pairs, cut at ``max_length``."""
    for ids, answer in texts:
        if len(ids) >= 3:
            n = config.max_length
            yield read_text(target, ids[:n], answer[:n], config.aux_layers)
