"""The ``speccompile`` command: finds its subcommands by name and turns errors into one line.

A subcommand's module is imported only when it is chosen, so that a missing optional library hurts
nobody else and ``--help`` is quick.
"""

from __future__ import annotations

import importlib
import sys

import click

from speccompile import __version__
from speccompile.errors import SpeccompileError

# name -> (one line of help, pip extra that brings its optional libraries)
COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("Compile a Llama model and its EAGLE head into an engine directory.", "gguf"),
    "run": ("Generate text with an engine.", ""),
    "inspect": ("Show what is in an engine directory.", ""),
    "verify": ("Compare speculative with plain decoding, token by token.", ""),
    "demo": ("Build the demo engine and show what speculation gains.", "gguf"),
    "bench": ("Measure speed against plain decoding and transformers.", "bench"),
    "tune": ("Choose draft trees by measurement and store them in an engine.", ""),
    "rollout": ("Let the target answer prompts, as training data for a head.", ""),
    "train": ("Train an EAGLE head by online distillation.", ""),
    "plot-run": ("Draw the learning curves of training runs.", "plot"),
    "eval-draft": ("Estimate a head's acceptance on rollouts.", ""),
}


class LazyGroup(click.Group):
    """A group whose commands live in ``speccompile.cli.<name>.command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        try:
            return importlib.import_module(f"speccompile.cli.{cmd_name.replace('-', '_')}").command
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("speccompile"):
                raise
            raise SpeccompileError(_missing(cmd_name, error.name)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in COMMANDS.items()])


def _missing(command: str, module: str | None) -> str:
    extra = COMMANDS[command][1]
    remedy = f"pip install 'speccompile[{extra}]'" if extra else "install speccompile again"
    return f"{command}: the Python module {module!r} is not installed; {remedy}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="speccompile")
def cli() -> None:
    """Ahead-of-time compiled EAGLE speculative decoding for Llama models."""


def main() -> None:
    """Entry point: exit code 2 and one line ``error: ...`` for everything the user can act on."""
    try:
        cli(prog_name="speccompile")
    except SpeccompileError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
