"""``speccompile build``: flags and recipe to a :class:`BuildConfig`, then the builder.

The flags are the fields of ``BuildConfig``; nothing is listed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speccompile.build.builder import build
from speccompile.build.config import BuildConfig, make_config
from speccompile.build.progress import Progress
from speccompile.cli.show import echo_json, echo_status


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for item in reversed(dataclasses.fields(BuildConfig)):
        name = item.name.replace("_", "-")
        flag = f"--{name}/--no-{name}" if item.default is True else f"--{name}"
        option = click.option(flag, item.name, default=None, help=item.metadata["help"])
        command = option(command)
    return command


@click.command("build")
@click.option(
    "--config",
    "recipe",
    type=click.Path(path_type=Path),
    default=None,
    help="YAML recipe; its keys are the flags below, which win.",
)
@_config_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(recipe: Path | None, as_json: bool, **flags: Any) -> None:
    """Compile a Llama model and its EAGLE head into an engine directory."""
    given = {name: value for name, value in flags.items() if value is not None}
    report = build(make_config(recipe=recipe, flags=given), Progress(echo_status))
    if as_json:
        echo_json(dataclasses.asdict(report))
    else:
        click.echo(report.summary())
