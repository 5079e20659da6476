"""The figure of ``tune``: speed by load, predicted and measured, and what a target call costs by rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.train.plot_style import COLOURS, MARKERS, legend_below, nth, panels, save, style
from speccompile.tune.tuner import TuneReport


def plot_report(report: TuneReport, path: Path) -> None:
    """Two panels.  Raises SpeccompileError when the file cannot be written."""
    with style():
        figure, grid = panels(1, 2, width=5.6, height=4.4)
        _speeds(grid[0][0], report)
        _costs(grid[0][1], report)
        save(figure, path)


def _speeds(axes: Any, report: TuneReport) -> None:
    for number, context in enumerate(report.table.context):
        cells = [row[number] for row in report.choices]
        batches = [cell.batch for cell in cells]
        colour = nth(COLOURS, number)
        axes.plot(
            batches, [c.tokens_per_s for c in cells], color=colour, label=f"predicted, {context} tokens"
        )
        axes.plot(
            batches, [c.off_tokens_per_s for c in cells], color=colour, linestyle=":",
            label=f"off, {context} tokens",
        )  # fmt: skip
    batches = [trial.batch for trial in report.trials]
    axes.plot(batches, [t.tokens_per_s for t in report.trials], "k^", label="measured")
    axes.plot(batches, [t.off_tokens_per_s for t in report.trials], "kx", label="measured, off")
    axes.set(title="Speed by load", xlabel="active requests", ylabel="tokens per second", xticks=batches)
    axes.set_ylim(bottom=0)
    legend_below(axes, 2)


def _costs(axes: Any, report: TuneReport) -> None:
    shown = [load for load in report.costs if load.context == report.table.context[0]]
    for number, load in enumerate(shown):
        axes.plot(
            load.target_step.x, [1e3 * seconds for seconds in load.target_step.seconds],
            color=nth(COLOURS, number), marker=nth(MARKERS, number), label=f"batch {load.batch}",
        )  # fmt: skip
    axes.set(
        title=f"Target call, {report.table.context[0]} tokens of context",
        xlabel="rows per request (drafts + 1)", ylabel="milliseconds",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    legend_below(axes, 2)
