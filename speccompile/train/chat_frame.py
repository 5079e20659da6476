"""The ids that a chat template puts around turns, and which tokens of a text are the assistant's.

``open`` leads to the first user text, ``close`` ends a user turn and ``ask`` leads from there to the answer,
``end`` ends an answer and ``next_user`` leads from there to the next user text.  An answer is every token
after ``marker`` (the generation prompt) up to its end-of-turn id, which is included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import ConfigError

_USER, _ANSWER, _USER_2 = "uqzu", "aqza", "vqzv"


@dataclass(frozen=True, kw_only=True)
class ChatFrame:
    """Token ids between the texts of a conversation; ``eos_ids`` end a turn: the checkpoint's, and the
    special id that the template puts after an answer."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    ask: tuple[int, ...]
    end: tuple[int, ...]
    next_user: tuple[int, ...]
    marker: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def bare(cls, eos_ids: tuple[int, ...]) -> ChatFrame:
        """For prompts without a template: nothing stands around an answer."""
        return cls(open=(), close=(), ask=(), end=(), next_user=(), marker=(), eos_ids=eos_ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Reads the frame off the template; ConfigError when it has no generation prompt."""
        user = {"role": "user", "content": _USER}
        turns = [user, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _USER_2}]
        bare = tokenizer.render_chat(turns, add_generation_prompt=False)
        text = tokenizer.render_chat(turns)
        opening, middle = bare.split(_USER)[0], bare.split(_ANSWER)[1].split(_USER_2)[0]
        marker = tokenizer.encode(text[len(bare) :], add_bos=False)
        if not text.startswith(bare) or not marker:
            raise ConfigError("the target's chat template has no generation prompt that marks answers")

        after = tokenizer.encode(middle, add_bos=False)[:1]
        ends = {*tokenizer.eos_ids, *(i for i in after if i in tokenizer.special_ids)}

        def ids(part: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """The end-of-turn id in front, if there is one, and the rest."""
            encoded = tuple(tokenizer.encode(part, add_bos=False))
            ended = int(bool(encoded) and encoded[0] in ends)
            return encoded[:ended], encoded[ended:]

        close, ask = ids(text.split(_USER_2)[1])
        end, next_user = ids(middle)
        return cls(
            open=tuple(tokenizer.encode(opening, add_bos=False)),
            close=close,
            ask=ask,
            end=end,
            next_user=next_user,
            marker=tuple(marker),
            eos_ids=tuple(sorted(ends)),
        )

    def answer_mask(self, ids: Sequence[int]) -> list[bool]:
        """The tokens of answers in a text that is already in the chat format, found by their marker."""
        mask = [False] * len(ids)
        inside = False
        for i, token in enumerate(ids):
            inside = inside and not (self.next_user and _starts(ids, i, self.next_user))
            mask[i] = inside
            if inside:
                inside = token not in self.eos_ids
            else:
                inside = _starts(ids, i + 1 - len(self.marker), self.marker)
        return mask

    def read_chat(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and which of them are answers.

        Turns are told apart by the template, not by their content, so a user who writes the marker is
        still the user.  An answer that merges with the generation prompt when encoded is not marked.
        """
        ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            begin = tokenizer.encode_chat(messages[:turn]) if message["role"] == "assistant" else []
            if begin and ids[: len(begin)] == begin:
                until = tokenizer.encode_chat(messages[: turn + 1], add_generation_prompt=False)
                last = _shared(ids, until)
                ends = (i + 1 for i in range(len(begin), last) if ids[i] in self.eos_ids)
                for i in range(len(begin), next(ends, last)):
                    mask[i] = True
        return ids, mask


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _starts(ids: Sequence[int], at: int, part: tuple[int, ...]) -> bool:
    """Whether ``part`` stands at position ``at``."""
    return at >= 0 and tuple(ids[at : at + len(part)]) == part
