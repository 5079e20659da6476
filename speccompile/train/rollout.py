"""Rollouts: the target answers prompts and writes prompts of its own; its texts and features are kept.

This is the data side of online distillation: a head is trained on texts that the target itself decodes, at
several temperatures, because those are the texts it will draft for.  A finished conversation's slot is filled
at once, so the batch never drains.  Every token is drawn by the runtime's own operator from (seed of the
conversation, position), so an answer is exactly what an engine emits for the text before it with that seed
and temperature, and does not depend on the conversations beside it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speccompile import ops
from speccompile.errors import ConfigError
from speccompile.model.llama import Llama
from speccompile.runtime.programs import Program
from speccompile.train.cache import CacheError, Rollout
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.paged_target import PagedTarget, Span
from speccompile.train.rollout_program import eager_program, rollout_limits
from speccompile.train.talk import Prompt, RolloutConfig, Talk

_SEED_BITS = 63
_BARREN_PER_SLOT = 4
_BARREN_LEAST = 64


class Generator:
    """Rollouts of one target from a list of prompts, which are taken in random order, again and again unless
    ``config.once``.

    ``program`` has the signature of ``target_step``; by default the graph runs as it is.  ``skipped_prompts``
    were longer than a conversation may be; ``dropped`` conversations ended before an answer began.
    """

    def __init__(
        self,
        target: Llama,
        frame: ChatFrame | None,
        prompts: Sequence[Prompt],
        config: RolloutConfig,
        program: Program | None = None,
    ) -> None:
        if frame is None and (config.own_prompts or config.second_turns or not prompts):
            raise ConfigError("own_prompts, second_turns: without a chat template both must be 0")
        if not prompts and config.own_prompts < 1:
            raise ConfigError("no prompts: give some, or let the target write all (own_prompts 1)")
        self.config, self.frame = config, frame or ChatFrame.bare(target.config.eos_token_ids)
        self.prompts = [p for p in prompts if len(p.ids) + 2 <= config.max_length]
        if prompts and not self.prompts:
            raise ConfigError(f"max_length {config.max_length}: every prompt is longer")
        self.skipped_prompts, self.dropped = len(prompts) - len(self.prompts), 0
        layers = config.stored_layers(target.config.num_hidden_layers)
        self._hidden_size = target.config.hidden_size
        width = 0 if config.features == "none" else self._hidden_size * (len(layers) + 1)
        self._target = PagedTarget(
            program or eager_program(target, config), target, rollout_limits(config), width
        )
        self._device = target.embed_tokens.weight.device
        self._random = random.Random(config.seed)
        self._order: list[int] = []
        self._asked = 0

    def rollouts(self, answer_tokens: int | None = None) -> Iterator[Rollout]:
        """Conversations with an answer, as they end.

        With ``answer_tokens`` no conversation is begun once that many are decoded, and all that were begun
        are finished, so short answers are not favoured.  CacheError when conversations only end unanswered.
        """
        talks: dict[int, Talk] = {}
        done = barren = 0
        patience = max(_BARREN_LEAST, _BARREN_PER_SLOT * self.config.batch_size)
        while True:
            decoded = done + sum(talk.answer_tokens for talk in talks.values())
            if answer_tokens is None or decoded < answer_tokens:
                for slot in range(self.config.batch_size):
                    if slot not in talks and (talk := self._talk()) is not None:
                        talks[slot] = talk
            if not talks:
                return
            self._advance(talks)
            for slot in [s for s, talk in talks.items() if talk.finished]:
                talk = talks.pop(slot)
                if talk.answer_tokens:
                    barren, done = 0, done + talk.answer_tokens
                    yield self._rollout(slot, talk)
                else:
                    barren, self.dropped = barren + 1, self.dropped + 1
            if barren >= patience:
                raise CacheError(
                    f"{barren} conversations in a row ended before an answer began: the target "
                    f"does not end its user turns within {self.config.max_user} tokens; raise max_user or "
                    f"lower own_prompts"
                )

    def _talk(self) -> Talk | None:
        """The next conversation; None when each prompt was to be asked once and has been."""
        if self.config.once and self._asked == len(self.prompts):
            return None
        own = not self.prompts or self._random.random() < self.config.own_prompts
        if not own and not self._order:
            self._order = self._random.sample(range(len(self.prompts)), len(self.prompts))
        prompt = Prompt(self.frame.open) if own else self.prompts[self._order.pop()]
        self._asked += not own
        return Talk(
            frame=self.frame,
            config=self.config,
            ids=list(prompt.ids),
            seed=self._random.getrandbits(_SEED_BITS),
            temperature=self._random.choice(self.config.temperatures),
            answering=not own,
            own_follow_up=self._random.random() < self.config.second_turns,
            given=deque(prompt.follow_ups),
        )

    def _advance(self, talks: dict[int, Talk]) -> None:
        """One call: every talk reads at least one token; rows that are left go to prompts in slot order."""
        free = self._target.limits.max_rows - len(talks)
        spans = []
        for slot, talk in talks.items():
            left = len(talk.ids) - talk.committed
            length = min(left, 1 + free)
            free -= length - 1
            part = talk.ids[talk.committed : talk.committed + length]
            spans.append(Span(slot, talk.committed, part, scored=length == left))
        logits = self._target.read(spans)
        for span in spans:
            talks[span.slot].committed += len(span.ids)
        drawing = [talks[span.slot] for span in spans if span.scored]
        for talk, token in zip(drawing, self._draw(logits, drawing), strict=True):
            talk.append(token)

    def _draw(self, logits_NV: Tensor, talks: list[Talk]) -> list[int]:
        if not talks:
            return []

        def each(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        off = logits_NV.new_zeros(len(talks))
        return ops.draw_tokens(
            logits_NV,
            each([talk.seed for talk in talks], torch.int64),
            each([len(talk.ids) for talk in talks], torch.int64),
            each([talk.drawing_temperature for talk in talks], torch.float32),
            off.long(),
            off + 1,
            off,
        ).tolist()

    def _rollout(self, slot: int, talk: Talk) -> Rollout:
        """The talk up to its last answer token; a user turn that came to nothing is cut off."""
        stored = self.config.features != "none"
        length = len(talk.ids) - talk.answer[::-1].index(True)
        feature = self._target.features(slot, length - 1)
        aux, hidden = feature[:, : -self._hidden_size], feature[:, -self._hidden_size :]
        return Rollout(
            ids=torch.tensor(talk.ids[:length]),
            answer=torch.tensor(talk.answer[:length]),
            hidden=hidden if stored else None,
            aux=aux if stored and aux.shape[1] else None,
            seed=talk.seed,
            temperature=talk.temperature,
        )
