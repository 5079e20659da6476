"""Learning curves of one or several runs, from their ``log.jsonl``: loss, accuracy, held-out acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from speccompile.errors import ConfigError
from speccompile.train.plot_style import COLOURS, LINES, MARKERS, legend_below, nth, panels, save, style
from speccompile.train.run_log import LOG_FILE, read_log

_SMOOTH_STEPS = 50
X_LABELS = {"steps": "optimizer step", "tokens": "positions trained (millions)"}


@dataclass(frozen=True)
class Run:
    """The records of one run; ``x`` of each step record and ``eval_x`` of each evaluation."""

    name: str
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    x: list[float]
    eval_x: list[float]


def read_run(folder: Path, by: str) -> Run:
    """The run in ``folder``, over optimizer ``steps`` or ``tokens``.  Raises ConfigError without a log."""
    records = read_log(folder / LOG_FILE)
    steps = [r for r in records if r["kind"] == "step"]
    if not steps:
        raise ConfigError(f"{folder / LOG_FILE}: no steps in it; give the --output folder of a training run")
    evals = [r for r in records if r["kind"] == "eval"]
    x = [float(r["step"]) for r in steps]
    if by == "tokens":
        x = [total / 1e6 for total in accumulate(r["tokens"] for r in steps)]
    at = dict(zip((r["step"] for r in steps), x, strict=True))
    evals = [r for r in evals if r["step"] in at]
    return Run(folder.resolve().name, steps, evals, x, [at[r["step"]] for r in evals])


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean that forgets over about 50 steps, unbiased at the beginning."""
    keep, total, weight, out = 1 - 1 / _SMOOTH_STEPS, 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def plot_runs(folders: Sequence[Path], path: Path, by: str = "steps") -> None:
    """Draws the runs side by side into one PNG: colours tell runs, line styles draft steps or trees."""
    runs = [read_run(folder, by) for folder in folders]
    with style():
        figure, ((loss, accuracy, acceptance),) = panels(1, 3, width=4.8, height=4.2, sharex=True)
        for index, run in enumerate(runs):
            _draw(run, nth(COLOURS, index), nth(MARKERS, index), (loss, accuracy, acceptance))
        for axes, title, y in (
            (loss, "Training loss", f"loss, mean of about {_SMOOTH_STEPS} steps"),
            (accuracy, "Accuracy on training texts", "share of drafts that are the target's token"),
            (acceptance, "Acceptance on held-out texts", "tokens per target call"),
        ):
            axes.set(title=title, xlabel=X_LABELS[by], ylabel=y)
        _zoom(loss, runs)
        depth = max(len(r.steps[0]["accuracy"]) for r in runs)
        _line_legend(accuracy, [f"draft step {n}" for n in range(1, depth + 1)])
        evals = [r for run in runs for r in run.evals]
        if evals:
            _line_legend(acceptance, [f"chain of {len(evals[0]['chain'])}", "tree, several a node"])
        else:
            acceptance.text(0.5, 0.5, "no evaluation in the log", ha="center", transform=acceptance.transAxes)
        names = [
            Line2D([], [], color=nth(COLOURS, i), marker=nth(MARKERS, i), label=run.name)
            for i, run in enumerate(runs)
        ]
        legend_below(loss, 3, names)
        save(figure, path)


def _draw(run: Run, colour: str, marker: str, axes: Sequence[Any]) -> None:
    loss, accuracy, acceptance = axes
    loss.plot(run.x, smooth([r["loss"] for r in run.steps]), color=colour)
    for step, values in enumerate(zip(*(r["accuracy"] for r in run.steps), strict=True)):
        accuracy.plot(run.x, smooth(values), color=colour, linestyle=nth(LINES, step))
    for line, key in zip(LINES, ("chain_length", "tree_length"), strict=False):
        lengths = [r[key] for r in run.evals]
        acceptance.plot(run.eval_x, lengths, color=colour, linestyle=line, marker=marker, markersize=5)


def _zoom(axes: Any, runs: Sequence[Run]) -> None:
    """Leaves the first steps' peak outside, so that the rest can be read."""
    later = [v for run in runs for v in smooth([r["loss"] for r in run.steps])[len(run.steps) // 50 :]]
    margin = 0.15 * (max(later) - min(later)) + 0.01
    axes.set_ylim(min(later) - margin, max(later) + margin)


def _line_legend(axes: Any, labels: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color="#444444", linestyle=nth(LINES, i), label=n) for i, n in enumerate(labels)
    ]
    legend_below(axes, 3, handles)
