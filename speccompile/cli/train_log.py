"""Progress of a training run: a bar (or a line now and then, without a terminal), or JSON lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from speccompile.cli.show import echo_json, echo_status

_SMOOTH = 0.95
_SECONDS_BETWEEN_LINES = 30.0


class TrainLog:
    """Callable that takes the trainer's records; ``steps`` is the run's length in optimizer steps."""

    def __init__(self, steps: int, as_json: bool) -> None:
        self._steps, self._as_json = steps, as_json
        self._bar: tqdm | None = None
        if not as_json and sys.stderr.isatty():
            self._bar = tqdm(
                total=steps,
                file=sys.stderr,
                bar_format="{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}{postfix}",
            )
        self._loss: float | None = None
        self._accuracy: list[float] = []
        self._last_line = 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        if self._as_json:
            echo_json(record)
        elif record["kind"] == "step":
            self._step(record)
        else:
            self._say(eval_line(record))

    def _step(self, record: dict[str, Any]) -> None:
        first = self._loss is None
        self._loss = record["loss"] if first else _mixed(self._loss or 0.0, record["loss"])
        known = record["accuracy"] if first else self._accuracy
        self._accuracy = [_mixed(a, b) for a, b in zip(known, record["accuracy"], strict=True)]
        text = step_text(self._loss, self._accuracy, record)
        if self._bar is not None:
            self._bar.n = record["step"]
            self._bar.set_postfix_str(text)
        elif record["step"] == self._steps or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            echo_status(f"step {record['step']}/{self._steps}, {text}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        echo_status(line)


def _mixed(mean: float, value: float) -> float:
    return _SMOOTH * mean + (1 - _SMOOTH) * value


def step_text(loss: float, accuracy: Sequence[float], record: dict[str, Any]) -> str:
    """Smoothed loss, top-1 accuracy of each draft step, tokens per second, time left."""
    by_step = "/".join(f"{a:.2f}" for a in accuracy)
    return (
        f"loss {loss:.3f}, accuracy {by_step}, {record['tokens_per_second']:.0f} tokens/s, "
        f"{time_text(record['eta'])} left"
    )


def time_text(seconds: float) -> str:
    """Hours, minutes and seconds, such as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def eval_line(record: dict[str, Any]) -> str:
    """One evaluation in words."""
    chain = " ".join(f"{p:.2f}" for p in record["chain"])
    best = ", best so far" if record["best"] else ""
    return (
        f"step {record['step']}: held-out acceptance length {record['chain_length']:.2f} with a chain of "
        f"{len(record['chain'])} (by depth {chain}), {record['tree_length']:.2f} with a tree{best}"
    )
