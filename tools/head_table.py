"""Acceptance of one head by question set and law, as a Markdown table.

The best tree of at most 16 drafts is chosen on the held-out part of the training rollouts and applied to the
questions, which nothing was chosen on.

    python tools/head_table.py --model target --draft head --data rollouts --texts MT-bench=mt_bench-t0 ...

Every TEXTS is the cache of `speccompile rollout --once` of one question set at one temperature.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from head_study import speccompile, standard_error

NODES = 16


def table(groups: list[dict[str, Any]]) -> str:
    """One row per set and law; lengths with standard errors."""
    rows = [["questions", "law", "chain-4", "default tree", f"best-{NODES}", "texts", "tokens", "rounds"]]
    rows.append(["---"] * len(rows[0]))
    for group in groups:
        trees = [group["trees"][3], *group["trees"][-2:]]
        cells = [f"{tree['length']:.3f} ± {standard_error(tree):.3f}" for tree in trees]
        counts = [f"{n:,}" for n in (group["texts"], group["positions"], trees[-1]["rounds"])]
        rows.append([group["data"], group["law"], *cells, *counts])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def depths(groups: list[dict[str, Any]]) -> str:
    """Share of rounds that accept at least so many drafts of chain-4."""
    lines = []
    for group in groups:
        shares = " ".join(f"{p:.3f}" for p in group["trees"][3]["reached"])
        lines.append(f"- {group['data']}, {group['law']}: {shares}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument(
        "--data", type=Path, help="rollouts that the head was trained on; without: use --tree"
    )
    parser.add_argument("--held-out-percent", type=int, default=2, help="that of the training run")
    parser.add_argument("--texts", action="append", required=True, metavar="NAME=CACHE")
    parser.add_argument("--tree", type=Path, required=True, help="file of the best tree; written with --data")
    args = parser.parse_args()
    pair = ("--model", args.model, "--draft", args.draft, "--json")
    groups = []
    if args.data is not None:
        chosen = speccompile(
            "eval-draft", *pair, "--data", f"held-out={args.data}",
            "--held-out-percent", args.held_out_percent, "--tree", "default",
            "--best-nodes", NODES, "--write-tree", args.tree,
        )  # fmt: skip
        groups = json.loads(chosen)["groups"]
    texts = [word for text in args.texts for word in ("--data", text)]
    measured = speccompile(
        "eval-draft", *pair, *texts, "--depth", 4, "--tree", "default", "--tree", args.tree
    )
    groups = json.loads(measured)["groups"] + groups
    print(table(groups), "\n\nShare of rounds that accept at least 1, 2, 3, 4 drafts of a chain:\n", sep="")
    print(depths(groups), "\n\n", f"best-{NODES}: ", args.tree.read_text(), sep="")


if __name__ == "__main__":
    main()
