"""Prompts of ``run``, ``verify`` and ``bench``: from the command line or from a JSONL file.

A row holds exactly one of ``prompt`` (text), ``messages`` (``[{"role", "content"}, ...]``) or ``turns``
(user messages of one conversation, answered one after another); further keys such as ``id`` are
carried along.  ``messages`` and ``turns`` always go through the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.errors import ConfigError

_KINDS = ("prompt", "messages", "turns")
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One text or conversation.  ``turns`` are user messages still to be asked after ``messages``."""

    name: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()

    def conversation(
        self, tokenizer: Tokenizer, answer: Callable[[list[int], str], str], *, only_first: bool = False
    ) -> list[Message]:
        """Call ``answer(token_ids, name)`` for every turn (or the first); returns the dialogue so far.

        The text that ``answer`` returns becomes the assistant's message.  A plain text leaves no dialogue.
        """
        if self.text is not None:
            answer(tokenizer.encode(self.text), self.name)
            return []
        history = list(self.messages)
        turns = self.turns[:1] if only_first else self.turns
        for number, turn in enumerate(turns or (None,), 1):
            if turn is not None:
                history.append({"role": "user", "content": turn})
            name = f"{self.name}/{number}" if len(self.turns) > 1 else self.name
            text = answer(tokenizer.encode_chat(history), name)
            history.append({"role": "assistant", "content": text})
        return history


def first_turns(rows: Iterable[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the first turn of every row."""
    found: list[list[int]] = []

    def take(token_ids: list[int], _name: str) -> str:
        found.append(token_ids)
        return ""

    for row in rows:
        row.conversation(tokenizer, take, only_first=True)
    return found


def single_prompt(text: str, name: str, *, chat: bool, history: Sequence[Message] = ()) -> Prompt:
    """A prompt from plain text; with ``chat`` it is the next user turn after ``history``."""
    return Prompt(name=name, messages=tuple(history), turns=(text,)) if chat else Prompt(name=name, text=text)


def read_prompts(path: Path, *, chat: bool = False) -> list[Prompt]:
    """All rows of a JSONL file.  Raises ConfigError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    prompts = list(_rows(lines, path, chat))
    if not prompts:
        raise ConfigError(f"{path}: holds no prompts")
    return prompts


def _rows(lines: list[str], path: Path, chat: bool) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from error
        yield _prompt(row, where, str(number), chat)


def _prompt(row: Any, where: str, number: str, chat: bool) -> Prompt:
    kinds = [kind for kind in _KINDS if kind in row] if isinstance(row, dict) else []
    if len(kinds) != 1:
        raise ConfigError(f"{where}: expected an object with exactly one of {', '.join(_KINDS)}")
    kind, value, name = kinds[0], row[kinds[0]], str(row.get("id", number))
    if kind == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: prompt must be text")
        return single_prompt(value, name, chat=chat)
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {kind} must be a list that is not empty")
    if kind == "turns":
        if not all(isinstance(turn, str) for turn in value):
            raise ConfigError(f"{where}: turns must be a list of texts")
        return Prompt(name=name, turns=tuple(value))
    for index, message in enumerate(value):
        texts = isinstance(message, dict) and (message.get("role"), message.get("content"))
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where}: messages[{index}] needs role and content as text")
    return Prompt(name=name, messages=tuple(value))
