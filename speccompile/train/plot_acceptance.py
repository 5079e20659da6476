"""The figure of ``eval-draft``: accepted drafts by depth and rank, acceptance length by context length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccompile.train.evaluate import CONTEXT_EDGES, context_name
from speccompile.train.measure import GroupReport
from speccompile.train.plot_style import COLOURS, LINES, MARKERS, legend_below, nth, panels, save, style

_MIN_ROUNDS = 30
"""A context bucket with fewer rounds is not drawn: its mean says little."""


def plot_acceptance(reports: Sequence[GroupReport], path: Path) -> None:
    """One row of panels per group: ranks by depth, and trees by context length."""
    with style():
        figure, grid = panels(len(reports), 2, width=5.6, height=4.4)
        for report, (by_depth, by_context) in zip(reports, grid, strict=True):
            name = f"{report.data}, {report.law}"
            _ranks(by_depth, report, name)
            _contexts(by_context, report, name)
        save(figure, path)


def _ranks(axes: Any, report: GroupReport, name: str) -> None:
    """Stacked shares of rounds by rank, and above them how often a depth follows its accepted parent."""
    shares, depths = report.ranks.marginal, range(1, len(report.ranks.marginal) + 1)
    bottom = [0.0] * len(shares)
    for rank in range(len(shares[0])):
        height = [row[rank] for row in shares]
        axes.bar(depths, height, bottom=bottom, color=nth(COLOURS, rank), label=f"rank {rank}", width=0.7)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    given = [sum(row) for row in report.ranks.conditional]
    axes.plot(depths, given, color="black", marker="o", markersize=4, label="any, if the parent was accepted")
    axes.set(
        title=f"{name}: accepted drafts", xlabel="draft depth", ylabel="share of rounds", ylim=(0, 1),
        xticks=list(depths),
    )  # fmt: skip
    axes.grid(axis="x", visible=False)
    legend_below(axes, 4)


def _contexts(axes: Any, report: GroupReport, name: str) -> None:
    used = [b for b in range(len(CONTEXT_EDGES)) if any(t.context_rounds[b] for t in report.trees)]
    for index, tree in enumerate(report.trees):
        buckets = [b for b in used if tree.context_rounds[b] >= _MIN_ROUNDS]
        axes.plot(
            buckets, [tree.context_length[b] for b in buckets], label=tree.name, color=nth(COLOURS, index),
            marker=nth(MARKERS, index), linestyle=nth(LINES, index // len(COLOURS)), markersize=5,
        )  # fmt: skip
    axes.set(
        title=f"{name}: acceptance length", xlabel="tokens before the round", ylabel="tokens per target call",
        xticks=used, xticklabels=[context_name(b) for b in used],
    )  # fmt: skip
    axes.margins(x=0.15)
    legend_below(axes, 4)
