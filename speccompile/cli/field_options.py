"""Command-line flags from the fields of a config dataclass: nothing is listed twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click


def field_options(config: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds ``--field-name`` for every field; ``help`` comes from the field's metadata.

    A tuple becomes a flag that may be repeated; its type is that of the default's first item (int if empty).
    A bool becomes a switch.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for item in reversed(dataclasses.fields(config)):
            default, many = item.default, isinstance(item.default, tuple)
            kind = type(default[0]) if many and default else int if many else type(default)
            command = click.option(
                f"--{item.name.replace('_', '-')}",
                item.name,
                type=kind,
                multiple=many,
                is_flag=kind is bool,
                default=default,
                show_default=True,
                help=item.metadata["help"],
            )(command)
        return command

    return add


def pick(config: type, values: dict[str, Any]) -> Any:
    """The config made of its fields among ``values``."""
    names = {item.name for item in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})
