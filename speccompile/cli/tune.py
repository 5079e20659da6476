"""``speccompile tune``: choose the draft tree for every load by measurement and keep it in the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speccompile.build.progress import Progress
from speccompile.build.table_file import TABLE_PATH, write_table
from speccompile.cli.prompts import first_turns, read_prompts
from speccompile.cli.show import echo_json, echo_status
from speccompile.cli.tree_tables import choice_table, tree_drawings, trial_table
from speccompile.errors import ConfigError, SpeccompileError
from speccompile.limits import Limits
from speccompile.runtime.engine import Engine
from speccompile.tree.replay import RankTable
from speccompile.tune.statistics import read_statistics
from speccompile.tune.tuner import TuneConfig, TuneReport, tune

_DEFAULT = TuneConfig()


@click.command("tune")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file; first turns only."
)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Prompts to use.")
@click.option(
    "--statistics",
    type=click.Path(path_type=Path),
    default=None,
    help="Take acceptance from the JSON of eval-draft instead of answers to the prompts.",
)
@click.option(
    "--batch-sizes", default=None, help="Active requests to tune for.  Default: 1,2,4,8.. up to the engine's."
)
@click.option("--contexts", default=None, help="Context lengths to tune for.  Default: 256,1024.")
@click.option(
    "--max-tokens", type=click.IntRange(2), default=_DEFAULT.max_tokens, show_default=True,
    help="Tokens per answer.",
)  # fmt: skip
@click.option(
    "--temperature", type=click.FloatRange(0), default=_DEFAULT.temperature, show_default=True,
    help="What to tune for; 0 is greedy.",
)  # fmt: skip
@click.option("--chat/--no-chat", default=True, show_default=True, help="Use the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Also draw this PNG."
)
def command(
    engine: Path, prompts: Path, limit: int, statistics: Path | None, batch_sizes: str | None,
    contexts: str | None, max_tokens: int, temperature: float, chat: bool, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Measure rounds and acceptance on this machine and store the best tree for every load in ENGINE."""
    draw = _plotter() if plot is not None else None
    loaded = Engine.load(engine, tuned=False)
    limits = loaded.programs.limits
    config = TuneConfig(
        batch_sizes=_sizes("--batch-sizes", batch_sizes) or default_batches(limits),
        contexts=_sizes("--contexts", contexts) or default_contexts(limits),
        max_tokens=max_tokens,
        temperature=temperature,
    )
    ids = first_turns(read_prompts(prompts, chat=chat)[:limit], loaded.tokenizer)
    report = tune(loaded, ids, config, Progress(echo_status), ranks=_ranks(statistics, limits))
    summary = report_json(report, config)
    write_table(loaded.path, loaded.manifest, report.table, summary)
    if draw is not None and plot is not None:
        draw(report, plot)
        echo_status(f"{plot}: written")
    if as_json:
        costs = [dataclasses.asdict(load) for load in report.costs]
        echo_json({"engine": str(engine), "table": report.table.to_json(), **summary, "costs": costs})
        return
    parts = [choice_table(summary["choices"]), trial_table(summary["trials"]), tree_drawings(report.table)]
    click.echo("\n\n".join([*parts, f"stored in {engine / TABLE_PATH}"]))


def default_batches(limits: Limits) -> tuple[int, ...]:
    """Powers of two up to the engine's largest batch, and that."""
    powers = [2**n for n in range(limits.max_batch_size.bit_length()) if 2**n < limits.max_batch_size]
    return (*powers, limits.max_batch_size)


def default_contexts(limits: Limits) -> tuple[int, ...]:
    """256 and 1024 tokens, or half of what a smaller engine holds."""
    return tuple(c for c in _DEFAULT.contexts if 2 * c <= limits.max_seq_len) or (limits.max_seq_len // 2,)


def report_json(report: TuneReport, config: TuneConfig) -> dict[str, Any]:
    """What is kept beside the table: how it was tuned, predicted and measured."""
    choices = [
        {**dataclasses.asdict(choice), "tree": choice.tree.name, "gain": choice.gain}
        for row in report.choices
        for choice in row
    ]
    return {
        "config": dataclasses.asdict(config),
        "positions": report.positions,
        "choices": choices,
        "trials": [dataclasses.asdict(trial) for trial in report.trials],
    }


def _sizes(flag: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"{flag} {text!r}: expected numbers such as 1,2,4")
    return tuple(map(int, parts))


def _ranks(statistics: Path | None, limits: Limits) -> RankTable | None:
    if statistics is None:
        return None
    return read_statistics(statistics, max_depth=limits.max_tree_depth, draft_topk=limits.draft_topk)


def _plotter() -> Callable[[TuneReport, Path], None]:
    """Fails before the work starts when the plotting library is missing."""
    try:
        from speccompile.tune.plot import plot_report
    except ModuleNotFoundError as error:
        raise SpeccompileError(
            f"--plot: the Python module {error.name!r} is not installed; pip install 'speccompile[plot]'"
        ) from error
    return plot_report
