"""Trains small heads that differ in one thing each, with equal token budgets, and prints one Markdown table.

Every run is `speccompile train` and `speccompile eval-draft`; finished ones are kept and not run again.

    python tools/head_study.py --model target --data rollouts --texts mt-bench=mt-bench-cache --output study

The held-out part of DATA and the TEXTS caches measure; both must be `speccompile rollout` caches.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BASE = {
    "kind": "eagle1", "layers": 1, "layer-norms": "yes", "init-layers": "target", "feature-weight": 0,
    "draft-vocab-size": 6144, "unroll": 2, "loss": "kl", "supervise": "answers", "lr": 1.5e-3, "seed": 0,
    "batch-tokens": 1024, "eval-sequences": 10, "checkpoint-seconds": 1e6,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "base": {},
    "loss lk": {"loss": "lk"},
    "loss coupling": {"loss": "coupling"},
    "loss greedy": {"loss": "greedy"},
    "loss topk-kl": {"loss": "topk-kl"},
    "loss tv": {"loss": "tv"},
    "loss kl:0.7,lk:0.3": {"loss": "kl:0.7,lk:0.3"},
    "supervise all": {"supervise": "all"},
    "unroll 1": {"unroll": 1},
    "unroll 3": {"unroll": 3},
    "vocabulary 2048": {"draft-vocab-size": 2048},
    "vocabulary 16384": {"draft-vocab-size": 16384},
    "1 shard": {"shards": 1},
    "another seed": {"seed": 1},
    "EAGLE-3": {"kind": "eagle3", "layer-norms": "no", "lr": 5e-4},
    "silent, public layout": {
        "layer-norms": "no", "init-layers": "silent", "feature-weight": 0.1, "lr": 2e-4,
    },
    "live, public layout": {"layer-norms": "no", "lr": 2e-4},
    "2 layers": {"layers": 2, "lr": 1e-3},
    "3 layers": {"layers": 3, "lr": 8e-4},
    "2 shards": {"shards": 2},
}  # fmt: skip
SHAPE = {"kind", "layers", "layer-norms", "init-layers"}


def speccompile(*words: object) -> str:
    """Runs the command; its standard output."""
    command = [sys.executable, "-m", "speccompile", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def part_of(data: Path, shards: int, output: Path) -> Path:
    """A cache of links to the first ``shards`` shards."""
    folder = output / f"data-{shards}"
    folder.mkdir(parents=True, exist_ok=True)
    for shard in sorted(data.glob("*.safetensors"))[:shards]:
        link = folder / shard.name
        if not link.exists():
            link.symlink_to(shard.resolve())
    return folder


def train(args: argparse.Namespace, folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run; its log records."""
    options = {**BASE, "steps": args.steps, "held-out-percent": args.held_out_percent, **options}
    shards = options.pop("shards", None)
    data = args.data if shards is None else part_of(args.data, shards, args.output)
    flags = [word for key, value in options.items() for word in (f"--{key}", value)]
    if not (folder / "train_state.pt").is_file():  # written at the end
        speccompile("train", "--model", args.model, "--data", data, "--output", folder, *flags, "--json")
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def start(args: argparse.Namespace) -> Path:
    """The untrained head that all runs of the base's shape start from: its fit takes as long as a run."""
    folder = args.output / "start"
    train(args, folder, {"steps": 1, "lr": 1e-12})
    return folder


def study(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains and measures one run, or reads what it gave before."""
    folder = args.output / name.replace(" ", "-").replace(",", "").replace(":", "-")
    result_file = folder / "result.json"
    if not result_file.is_file():
        options = dict(RUNS[name])
        if args.init is not None:
            options |= {"init": args.init, "lr": args.lr}
        elif not SHAPE & options.keys():
            options["init"] = start(args)
        steps = [r for r in train(args, folder, options) if r["kind"] == "step"]
        held_out = ("--held-out-percent", args.held_out_percent, "--max-texts", 50)
        result = {
            "tokens": sum(r["tokens"] for r in steps),
            "seconds": sum(r["seconds"] for r in steps),
            "held-out": measure(args, folder, [f"held-out={args.data}"], held_out),
            **{text.split("=")[0]: measure(args, folder, [text]) for text in args.texts},
        }
        result_file.write_text(json.dumps(result))
    return json.loads(result_file.read_text())


def measure(
    args: argparse.Namespace, head: Path, data: list[str], extra: tuple[object, ...] = ()
) -> list[Any]:
    """Name, acceptance length and rounds of a chain of 4 and the best tree of 16 on greedy texts."""
    words = [word for item in data for word in ("--data", item)]
    text = speccompile(
        "eval-draft", "--model", args.model, "--draft", head, *words, *extra,
        "--sampling", "greedy", "--depth", 4, "--best-nodes", 16, "--json",
    )  # fmt: skip
    (group,) = json.loads(text)["groups"]
    return [group["trees"][3], group["trees"][-1]]


def standard_error(tree: dict[str, Any]) -> float:
    """Of the acceptance length, as if rounds were independent; ``reached[d]`` is P(accepted > d)."""
    mean = sum(tree["reached"])
    square = sum((2 * d + 1) * p for d, p in enumerate(tree["reached"]))
    return math.sqrt((square - mean**2) / tree["rounds"])


def table(results: dict[str, dict[str, Any]], sets: list[str]) -> str:
    """One row per run; of every set the chain of 4 and the best tree, with the chain's standard error."""
    heads = [f"{name}, {tree}" for name in sets for tree in ("chain-4", "best-16")]
    rows = [["run", *heads, "positions", "positions/s"]]
    for name, result in results.items():
        cells = []
        for chain, best in (result[name] for name in sets):
            cells += [f"{chain['length']:.3f} ± {standard_error(chain):.3f}", f"{best['length']:.3f}"]
        speed = result["tokens"] / result["seconds"]
        rows.append([name, *cells, f"{result['tokens']:,}", f"{speed:.0f}"])
    rows.insert(1, ["---"] * len(rows[0]))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    counts = [f"{name} {results[next(iter(results))][name][0]['rounds']}" for name in sets]
    return "\n".join([*lines, "", f"Rounds of chain-4 in the first run: {', '.join(counts)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", action="append", default=[], metavar="NAME=CACHE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=70, help="of about 900 positions")
    parser.add_argument(
        "--init", type=Path, help="trained head that all runs continue, in place of a fresh one"
    )
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate with --init")
    parser.add_argument("--held-out-percent", type=int, default=10, help="that of --init's run, if given")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this long")
    parser.add_argument("--only", action="append", choices=list(RUNS), metavar="RUN", help="may be repeated")
    args = parser.parse_args()
    started, results = time.monotonic(), {}
    for name in args.only or RUNS:
        if time.monotonic() - started > 60 * args.minutes:
            print(f"out of time before {name!r}", file=sys.stderr)
            break
        results[name] = study(name, args)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    print(table(results, ["held-out", *(text.split("=")[0] for text in args.texts)]))


if __name__ == "__main__":
    main()
