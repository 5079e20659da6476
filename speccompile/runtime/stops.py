"""Stop strings: find the earliest one, wherever tokens and rounds end, and never show part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that arrives in pieces.

    The first stop string to be completed wins (the longest if two end together), so the result does
    not depend on how the text was cut into pieces.  Text that may be the beginning of a stop string
    is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string is complete (the text ends before it)."""
        text, self._held = self._held + piece, ""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start = min(found)
            return text[:start], True
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        split = len(text) - hold
        self._held = text[split:]
        return text[:split], False

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
