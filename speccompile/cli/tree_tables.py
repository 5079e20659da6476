"""The tree table as text, for ``tune`` and ``inspect``: predicted, measured, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speccompile.cli.show import table
from speccompile.tree.draw import draw
from speccompile.tree.table import TreeTable


def choice_table(choices: Sequence[Mapping[str, Any]]) -> str:
    """One row per cell: the tree and what was predicted for it."""
    head = ["requests", "context", "tree", "tokens/round", "round ms", "tokens/s", "off tokens/s", "gain"]
    rows = [
        [
            f"<= {choice['batch']}",
            f"<= {choice['context']}",
            choice["tree"],
            f"{choice['tokens_per_round']:.2f}",
            f"{1e3 * choice['round_s']:.1f}",
            f"{choice['tokens_per_s']:.1f}",
            f"{choice['off_tokens_per_s']:.1f}",
            f"{choice['gain']:.2f}",
        ]
        for choice in choices
    ]
    title = (
        "Predicted (tokens/round per request: accepted drafts + bonus; tokens/s of all requests; the last\n"
    )
    return title + "row and column also serve everything above)\n" + table([head, *rows])


def trial_table(trials: Sequence[Mapping[str, Any]]) -> str:
    """One row per batch: the tree that was run and what it reached."""
    head = ["requests", "tree run", "tokens/round", "tokens/s", "off tokens/s", "gain", "predicted gain"]
    rows = [
        [
            str(trial["batch"]),
            trial["tree"],
            f"{trial['tokens_per_round']:.2f}",
            f"{trial['tokens_per_s']:.1f}",
            f"{trial['off_tokens_per_s']:.1f}",
            f"{trial['gain']:.2f}",
            f"{trial['predicted_gain']:.2f}",
        ]
        for trial in trials
    ]
    return "Measured (in turn with off; a tree that loses is replaced by off)\n" + table([head, *rows])


def tree_drawings(trees: TreeTable) -> str:
    """Every tree of the table with drafts."""
    drawn = [draw(tree) for tree in trees.trees if tree.num_nodes]
    return "\n\n".join(drawn) if drawn else "off: plain decoding at every load"
