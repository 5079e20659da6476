"""Progress of a build: one line per stage, a bar within long stages, times and peak memory.

The caller brings the function that shows a line; bars go to standard error and only to a terminal.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


class Progress:
    """Shows stages through ``echo`` and remembers how long each took (``times``, seconds)."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._start = time.perf_counter()
        self.times: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Show one line."""
        self._echo(f"[{self.total:6.1f} s] {text}")

    @contextlib.contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Run one stage; ``name`` is its key in ``times``."""
        self.note(text)
        start = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    def bar(self, items: Iterable[Item], unit: str) -> Iterable[Item]:
        """Iterate with a bar that disappears at the end."""
        return tqdm(items, unit=unit, leave=False, file=sys.stderr, disable=None)

    @property
    def total(self) -> float:
        """Seconds since the build began."""
        return time.perf_counter() - self._start


def peak_memory() -> int:
    """Largest resident set so far, in bytes, of this process or of one compiler it started."""
    unit = 1 if sys.platform == "darwin" else 1024
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(w).ru_maxrss for w in who) * unit
