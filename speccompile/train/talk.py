"""One conversation in the making: its turns, what is forced by the template and what the target decodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from speccompile.checkpoint.head_aux import default_aux_layers
from speccompile.errors import ConfigError
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.config import option

_MIN_USER_TOKENS = 4
_USER_TEMPERATURE = 1.0
FEATURES = ("none", "hidden", "all")
COMPILE = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are made.  Lengths are in tokens; ``aux_layers`` are input-of-layer ids.

    What a shard stores per token of a target of hidden size h in bf16: ``none`` 5 bytes (the text),
    ``hidden`` 2 h more (EAGLE-1), ``all`` 8 h more (EAGLE-3, three aux layers); the trainer computes what is
    missing.  KV memory is ``batch_size * max_length`` slots.
    """

    batch_size: int = option(128, "Conversations decoded together.")
    max_answer: int = option(256, "Longest answer.")
    max_user: int = option(100, "Longest user turn that the target writes itself.")
    max_length: int = option(640, "Longest conversation; longer prompts are skipped.")
    own_prompts: float = option(0.25, "Share of conversations whose user turn the target writes.")
    second_turns: float = option(0.25, "Chance that the target also asks and answers a follow-up.")
    once: bool = option(False, "Answer every prompt once and stop; needs --own-prompts 0.")
    temperatures: tuple[float, ...] = option((0.0, 0.0, 0.7, 1.0), "Each conversation draws one of these.")
    features: str = option(
        "hidden", "Stored per token: none, hidden (EAGLE-1) or all (EAGLE-3); the trainer computes the rest."
    )
    aux_layers: tuple[int, ...] = option((), "With --features all: layers whose inputs are stored.")
    compile: str = option(
        "auto", "on, off, or auto: compile the target (about a minute) from 50000 answer tokens on."
    )
    seed: int = option(0, "Seed of choices and sampling.")

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_answer", "max_user", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("own_prompts", "second_turns"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be between 0 and 1")
        if self.once and self.own_prompts:
            raise ConfigError(
                f"once: the prompts that the target writes never run out; give own_prompts 0, not "
                f"{self.own_prompts}"
            )
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise ConfigError(f"temperatures {self.temperatures}: at least one, finite, none negative")
        for name, known in (("features", FEATURES), ("compile", COMPILE)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(known)}")
        if self.aux_layers and self.features != "all":
            raise ConfigError(f"aux_layers: stored with features all only, this is {self.features}")

    def stored_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers whose inputs are stored, ascending: those named, else the EAGLE-3 default of the target."""
        if self.features != "all":
            return ()
        layers = tuple(sorted(set(self.aux_layers))) or default_aux_layers(num_layers, "features all")
        if not 0 <= layers[0] <= layers[-1] < num_layers:
            raise ConfigError(f"aux_layers {list(layers)}: the target has layers 0 to {num_layers - 1}")
        return layers


@dataclass(frozen=True)
class Prompt:
    """Ids up to and including the generation prompt, and the ids of user texts to ask after the answers."""

    ids: tuple[int, ...]
    follow_ups: tuple[tuple[int, ...], ...] = ()


@dataclass(kw_only=True)
class Talk:
    """``ids`` so far with their ``answer`` marks; ``seed`` and ``temperature`` are the law of its answers.

    The first ``committed`` ids have been read by the target; the last id of a finished talk never is.
    """

    frame: ChatFrame
    config: RolloutConfig
    ids: list[int]
    seed: int
    temperature: float
    answering: bool
    own_follow_up: bool
    given: deque[tuple[int, ...]]
    answer: list[bool] = field(init=False)
    answer_tokens: int = 0
    committed: int = 0
    finished: bool = False
    _decoded: int = 0

    def __post_init__(self) -> None:
        self.answer = [False] * len(self.ids)

    @property
    def drawing_temperature(self) -> float:
        """Of the next token; user turns are always drawn at 1, so that they differ."""
        return self.temperature if self.answering else _USER_TEMPERATURE

    def append(self, drawn: int) -> None:
        """Takes the next token and, where it ends a turn, the template's ids up to the next one."""
        self.ids.append(drawn)
        self.answer.append(self.answering)
        self.answer_tokens += self.answering
        self._decoded += 1
        ended = drawn in self.frame.eos_ids
        if self.answering:
            self._after_answer_token(ended)
        else:
            self._after_user_token(ended)
        self.finished = self.finished or len(self.ids) >= self.config.max_length

    def _after_answer_token(self, ended: bool) -> None:
        frame, cut = self.frame, self._decoded >= self.config.max_answer
        if (ended or cut) and self.given:
            end = () if ended else frame.end
            self._start(True, (*end, *frame.next_user, *self.given.popleft(), *frame.close, *frame.ask))
        elif ended and self.own_follow_up:
            self.own_follow_up = False
            self._start(False, frame.next_user)
        elif ended or cut:
            self.finished = True

    def _after_user_token(self, ended: bool) -> None:
        if ended and self._decoded >= _MIN_USER_TOKENS:
            self._start(True, self.frame.ask)
        elif ended or self._decoded >= self.config.max_user:
            self.finished = True

    def _start(self, answering: bool, forced: Sequence[int]) -> None:
        """The next turn, if there is room for it."""
        if len(self.ids) + len(forced) >= self.config.max_length:
            self.finished = True
            return
        self.answering, self._decoded = answering, 0
        self.ids.extend(forced)
        self.answer.extend([False] * len(forced))
