"""The ids that a chat template puts around turns, so that the target can also write user turns.

``open`` leads to the first user text, ``close`` ends a user turn and ``ask`` leads from there to the answer,
``next_user`` leads from an ended answer to the next user text.  An answer is every token after ``marker``
(the generation prompt) up to its end-of-turn id, which is included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import ConfigError

_USER, _ANSWER, _USER_2 = "uqzu", "aqza", "vqzv"


@dataclass(frozen=True, kw_only=True)
class ChatFrame:
    """Token ids between the texts of a conversation; ``eos_ids`` end a turn."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    ask: tuple[int, ...]
    next_user: tuple[int, ...]
    marker: tuple[int, ...]
    eos_ids: tuple[int, ...]

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

        def ids(part: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """The end-of-turn id in front, if there is one, and the rest."""
            encoded = tuple(tokenizer.encode(part, add_bos=False))
            ends = int(bool(encoded) and encoded[0] in tokenizer.eos_ids)
            return encoded[:ends], encoded[ends:]

        close, ask = ids(text.split(_USER_2)[1])

        return cls(
            open=tuple(tokenizer.encode(opening, add_bos=False)),
            close=close,
            ask=ask,
            next_user=ids(middle)[1],
            marker=tuple(marker),
            eos_ids=tokenizer.eos_ids,
        )

    def answer_mask(self, ids: Tensor) -> Tensor:
        """Bool [n]: the tokens of answers, their end-of-turn id included."""
        mask, values, width = torch.zeros(len(ids), dtype=torch.bool), ids.tolist(), len(self.marker)
        inside = False
        for i, token in enumerate(values):
            mask[i] = inside
            if inside and token in self.eos_ids:
                inside = False
            elif tuple(values[max(0, i + 1 - width) : i + 1]) == self.marker:
                inside = True
        return mask
