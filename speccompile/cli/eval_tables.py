"""The tables of ``speccompile eval-draft``: acceptance by tree, by depth and rank, and by context length."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.cli.show import table
from speccompile.train.evaluate import CONTEXT_EDGES, context_name
from speccompile.train.measure import GroupReport


def all_tables(reports: Sequence[GroupReport]) -> str:
    """Everything, as text."""
    parts = [length_table(reports)]
    for report in reports:
        parts += [rank_table(report), context_table(report)]
    return "\n\n".join(parts)


def length_table(reports: Sequence[GroupReport]) -> str:
    """One row per tree, one column per group."""
    head = ["tree", "drafts", "depth", *(f"{r.data} {r.law}" for r in reports)]
    rows = [
        [tree.name, tree.nodes, tree.depth, *(f"{r.trees[i].length:.3f}" for r in reports)]
        for i, tree in enumerate(reports[0].trees)
    ]
    counts = [
        ["(texts)", "", "", *(r.texts for r in reports)],
        ["(tokens)", "", "", *(r.positions for r in reports)],
    ]
    return (
        "Acceptance length: accepted drafts + bonus token per target call. The root is no draft: a target\n"
        "call has one row more than drafts.\n" + table([head, *rows, *counts])
    )


def rank_table(report: GroupReport) -> str:
    """Depth by rank: share of all rounds, and of the rounds that accepted the parent."""
    branch = len(report.ranks.marginal[0])
    ranks = [f"rank {k}" for k in range(branch)]
    rows = [["depth", *ranks, "any", "|", *ranks, "any"]]
    for depth, (all_rounds, given) in enumerate(
        zip(report.ranks.marginal, report.ranks.conditional, strict=True), 1
    ):
        rows.append([str(depth), *_shares(all_rounds), "|", *_shares(given)])
    return (
        f"{report.data} {report.law}: accepted drafts by depth and rank, {branch} candidates a node;\n"
        "left: share of all rounds, right: share of the rounds that accepted the parent\n" + table(rows)
    )


def _shares(values: Sequence[float]) -> list[str]:
    return [f"{v:.3f}" for v in (*values, sum(values))]


def context_table(report: GroupReport) -> str:
    """Acceptance length by tokens before the round; ``rounds`` are those of the first tree."""
    used = [i for i in range(len(CONTEXT_EDGES)) if any(t.context_rounds[i] for t in report.trees)]
    rows = [["context", f"rounds of {report.trees[0].name}", *(t.name for t in report.trees)]]
    for i in used:
        lengths = [f"{t.context_length[i]:.3f}" if t.context_rounds[i] else "-" for t in report.trees]
        rows.append([context_name(i), str(report.trees[0].context_rounds[i]), *lengths])
    return f"{report.data} {report.law}: acceptance length by tokens before the root\n" + table(rows)
