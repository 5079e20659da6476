"""Small output helpers shared by the commands: JSON lines, status lines, aligned tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def echo_json(value: Any) -> None:
    """One JSON object on one line of standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def echo_status(line: str) -> None:
    """A line about progress, on standard error so that output can be piped."""
    click.echo(line, err=True)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as left-aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
