"""``speccompile plot-run``: learning curves of training runs as one PNG."""

from __future__ import annotations

from pathlib import Path

import click

from speccompile.cli.show import echo_status
from speccompile.train.plot import X_LABELS, plot_runs


@click.command("plot-run")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="PNG to write."
)
@click.option(
    "--by", type=click.Choice(list(X_LABELS)), default="steps", show_default=True, help="Horizontal axis."
)
def command(runs: tuple[Path, ...], output: Path, by: str) -> None:
    """Draw loss, accuracy and held-out acceptance of RUNS, the --output folders of `train`."""
    plot_runs(runs, output, by)
    echo_status(f"{output}: written")
