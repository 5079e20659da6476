"""Training data in JSONL: any of the usual row forms, read tolerantly and reported by line.

A row is ``{"prompt"}``, ``{"prompt", "response"}``, ``{"messages": [{"role", "content"}]}``,
``{"conversations": [{"from", "value"}]}`` (ShareGPT; also role/content), ``{"turns": [user texts]}`` or
``{"text"}`` (already in the target's chat format).  A row that cannot be used is skipped with its line
number and reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.errors import ConfigError

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SHOWN_LINES = 3


class _OddRowError(ValueError):
    """Why one row is skipped."""


@dataclass(frozen=True)
class Row:
    """A usable row: ``text``, or ``messages``: system (first only), user and assistant in turn.

    ``follow_ups`` are further user texts, to be asked after the answers.
    """

    line: int
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    follow_ups: tuple[str, ...] = ()


@dataclass
class RowReport:
    """What was skipped: reason -> line numbers."""

    skipped: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, line: int) -> None:
        self.skipped.setdefault(reason, []).append(line)

    def lines(self) -> list[str]:
        """One line per reason, such as ``skipped 2 rows (lines 3, 9): not JSON``."""
        out = []
        for reason, numbers in self.skipped.items():
            shown = ", ".join(map(str, numbers[:_SHOWN_LINES])) + (
                ", ..." if len(numbers) > _SHOWN_LINES else ""
            )
            out.append(f"skipped {len(numbers)} rows (lines {shown}): {reason}")
        return out


def read_rows(path: Path) -> tuple[list[Row], RowReport]:
    """All usable rows; ConfigError when the file cannot be read or nothing usable is left."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    rows, report = [], RowReport()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(line, number))
            except _OddRowError as error:
                report.add(str(error), number)
    if not rows:
        reasons = "; ".join(report.lines()) or "the file is empty"
        raise ConfigError(f"{path}: no usable rows: {reasons}")
    return rows, report


def _row(line: str, number: int) -> Row:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise _OddRowError("not JSON") from None
    if not isinstance(data, dict):
        raise _OddRowError("not a JSON object")
    if "prompt" in data:
        turns = [("user", data["prompt"])]
        if data.get("response") is not None:
            turns.append(("assistant", data["response"]))
        return Row(number, _checked(turns))
    for key in ("messages", "conversations"):
        if key in data:
            return Row(number, _checked(list(_turns(data[key], key))))
    if "turns" in data:
        if not isinstance(data["turns"], list) or not data["turns"]:
            raise _OddRowError("turns is empty or no list")
        users = _checked([("user", text) for text in data["turns"]], alternate=False)
        return Row(number, users[:1], follow_ups=tuple(m["content"] for m in users[1:]))
    if "text" in data:
        return Row(number, text=_text(data["text"]))
    raise _OddRowError("none of prompt, messages, conversations, turns, text")


def _turns(items: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(items, list) or not items:
        raise _OddRowError(f"{key} is empty or no list")
    for item in items:
        if not isinstance(item, dict):
            raise _OddRowError(f"{key} holds something that is no object")
        role = str(item.get("role", item.get("from")))
        if role not in _ROLES:
            raise _OddRowError(f"role {role!r} is not user, assistant or system")
        yield _ROLES[role], item.get("content", item.get("value"))


def _checked(turns: list[tuple[str, Any]], alternate: bool = True) -> tuple[dict[str, str], ...]:
    texts = [_text(text) for _, text in turns]
    roles = [role for role, _ in turns]
    talk = roles[1:] if roles[0] == "system" else roles
    if not talk:
        raise _OddRowError("a system turn only")
    if talk[0] != "user":
        raise _OddRowError("does not start with a user turn")
    if alternate and any(role != ("user", "assistant")[i % 2] for i, role in enumerate(talk)):
        raise _OddRowError("user and assistant turns do not alternate")
    return tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _OddRowError("a turn without text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _OddRowError("text that is not valid Unicode") from None
    return value
