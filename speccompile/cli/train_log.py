"""Progress of a training run: a bar with the smoothed loss, evaluation lines, or JSON lines."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from speccompile.cli.show import echo_json, echo_status

_SMOOTH = 0.95


class TrainLog:
    """Callable that takes the trainer's records."""

    def __init__(self, steps: int, as_json: bool) -> None:
        self._as_json = as_json
        self._bar = None if as_json else tqdm(total=steps, unit="step", file=sys.stderr, disable=None)
        self._mean: dict[str, float] = {}

    def __call__(self, record: dict[str, Any]) -> None:
        if self._as_json:
            echo_json(record)
        elif record["kind"] == "step":
            self._step(record)
        else:
            chain = " ".join(f"{p:.2f}" for p in record["chain"])
            best = ", best so far" if record["best"] else ""
            echo_status(
                f"step {record['step']}: held-out acceptance length {record['chain_length']:.2f} "
                f"(by depth {chain}), {record['tree_length']:.2f} with a tree{best}"
            )

    def _step(self, record: dict[str, Any]) -> None:
        now = {
            "loss": record["loss"],
            "accuracy": record["accuracy"][0],
            "tok/s": record["tokens"] / max(record["seconds"], 1e-9),
        }
        for key, value in now.items():
            self._mean[key] = _SMOOTH * self._mean.get(key, value) + (1 - _SMOOTH) * value
        if self._bar is not None:
            self._bar.n = record["step"]
            mean = self._mean
            self._bar.set_postfix_str(
                f"loss {mean['loss']:.3f}, accuracy {mean['accuracy']:.3f}, {mean['tok/s']:.0f} tok/s"
            )
