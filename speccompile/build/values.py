"""Parsers of build settings: one raw value, from YAML or from a flag's text, to a typed one.

Each raises ValueError that says what is expected; :mod:`speccompile.build.config` adds where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TreeSpec = str | tuple[tuple[int, ...], ...]


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected text")
    return value


def count(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def switch(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return value

    return parse


def layers(value: Any) -> tuple[int, ...]:
    """Layer ids from a list or from text such as ``2,15,27``."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)):
        ids: list[Any] = [int(p) if isinstance(p, str) and p.strip().isdigit() else p for p in parts]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            return tuple(ids)
    raise ValueError("expected layer ids such as 2,15,27")


def tree_spec(value: Any) -> TreeSpec:
    """A tree name, a file, ``off``, or a list of nodes given as rank paths (``[[0], [0, 0], [1]]``)."""
    if value is False:  # YAML 1.1 reads a bare `off` as false
        return "off"
    if isinstance(value, str) and value:
        return value
    paths = value if isinstance(value, (list, tuple)) else ()
    if paths and all(isinstance(p, (list, tuple)) and all(type(r) is int for r in p) for p in paths):
        return tuple(tuple(p) for p in paths)
    raise ValueError("expected a tree name, a file, off, or a list of rank paths")


def auto_or(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parse_auto(value: Any) -> Any:
        if value == "auto":
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from error

    return parse_auto
