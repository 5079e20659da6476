"""From a row of the data to token ids: a prompt for the target, or a text with its answers marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import RequestError
from speccompile.train.chat_frame import ChatFrame
from speccompile.train.rows import Row, RowReport
from speccompile.train.talk import Prompt

_T = TypeVar("_T")


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
    marker = frame.marker if frame else ()
    ends = [e for e in range(len(marker), len(ids)) if marker and tuple(ids[e - len(marker) : e]) == marker]
    return Prompt(tuple(ids[: ends[-1]] if ends else ids))


def make_text(row: Row, tokenizer: Tokenizer, frame: ChatFrame) -> tuple[Tensor, Tensor]:
    """Ids i64 and answer mask bool of a row as it is."""
    if row.text is None:
        ids, mask = frame.read_chat(tokenizer, row.messages)
    else:
        ids = tokenizer.encode(row.text, add_bos=False)
        mask = frame.answer_mask(ids)
    return torch.tensor(ids), torch.tensor(mask)


def each_row(rows: Sequence[Row], make: Callable[[Row], _T], report: RowReport) -> list[_T]:
    """``make`` of every row; rows that the chat template refuses are reported by line."""
    made = []
    for row in rows:
        try:
            made.append(make(row))
        except RequestError as error:
            report.add(str(error), row.line)
    return made
