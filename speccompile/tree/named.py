"""Names, files and inline lists that stand for a tree.

``off`` (plain decoding), ``chain-D`` (D drafts in a row), ``mc_sim_7b_63`` (the 25-draft tree of
EAGLE-1's ``choices.py``), ``deep-15`` (15 drafts) and ``default``; a JSON or YAML file holding a list of
rank paths or the output of :meth:`~speccompile.tree.tree.Tree.to_json`; or such a list written inline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from speccompile.errors import ConfigError
from speccompile.tree.tree import Tree, tree_from_json, tree_from_paths


def _digits(*levels: str) -> list[list[int]]:
    return [[int(digit) for digit in path] for level in levels for path in level.split()]


# fmt: off
_NAMED = {
    "mc_sim_7b_63": _digits("0 1 2 3", "00 01 02 10 11 20 21 30",
                            "000 001 002 010 011 020 021 100", "0000 0001 0002", "00000 00001"),
    # On the CPUs measured so far a target call costs the same for 2 to 6 rows and 1.8 times that for 16, a
    # draft step 7 % of it: small, wide and shallow won against chains and larger trees.
    "default": _digits("0 1 2", "00 10"),
    "deep-15": _digits("0 1 2", "00 01 02 10", "000 001 010 100", "0000 0001", "00000 000000"),
}
# fmt: on
TREE_NAMES = ("off", "chain-D", *_NAMED)


def chain(depth: int) -> Tree:
    """``depth`` drafts in a row; each is the best child of the one before."""
    return tree_from_paths([[0] * length for length in range(1, depth + 1)], name=f"chain-{depth}")


OFF = Tree((), name="off")


def named_tree(name: str) -> Tree:
    """The tree called ``name``.  Raises ConfigError listing the names."""
    if name == "off":
        return OFF
    if match := re.fullmatch(r"chain-([1-9]\d{0,2})", name):
        return chain(int(match[1]))
    if name in _NAMED:
        return tree_from_paths(_NAMED[name], name=name)
    raise ConfigError(
        f"tree {name!r} is neither a file nor a known name; use one of {', '.join(TREE_NAMES)}, "
        "a .json/.yaml file, or a list of rank paths"
    )


def tree_from_file(path: Path) -> Tree:
    """Tree from a JSON or YAML file.  Raises ConfigError naming the file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"tree file {path}: cannot be read as JSON or YAML ({error})") from error
    try:
        return tree_from_paths(data, name=path.stem) if isinstance(data, list) else tree_from_json(data)
    except ConfigError as error:
        raise ConfigError(f"tree file {path}: {error}") from error


def resolve_tree(spec: str | Path | Sequence[Sequence[int]] | Tree | dict[str, Any]) -> Tree:
    """Tree from a name, a file, an inline list, its JSON form, or a tree.  Raises ConfigError."""
    if isinstance(spec, Tree):
        return spec
    if isinstance(spec, Path):
        return tree_from_file(spec)
    if isinstance(spec, str):
        if spec.lstrip().startswith("["):
            return _inline(spec)
        path = Path(spec)
        return tree_from_file(path) if path.suffix in (".json", ".yaml", ".yml") else named_tree(spec)
    if isinstance(spec, dict):
        return tree_from_json(spec)
    if isinstance(spec, (list, tuple)):
        return tree_from_paths(spec)
    raise ConfigError(f"tree: expected a name, a file or a list of rank paths, got {type(spec).__name__}")


def _inline(text: str) -> Tree:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"tree {text!r} is not a list of rank paths like [[0], [1], [0, 0]]") from error
    return tree_from_paths(data)


def check_tree(tree: Tree, *, draft_topk: int, max_depth: int, max_rows: int) -> None:
    """Raise ConfigError when ``tree`` needs more than an engine (or build) offers."""
    for have, limit, what, key in (
        (tree.max_rank + 1, draft_topk, "candidates per node", "draft_topk"),
        (tree.depth, max_depth, "levels", "max_tree_depth"),
        (tree.rows, max_rows, "rows (drafts + 1)", "max_rows"),
    ):
        if have > limit:
            raise ConfigError(f"tree {tree.name!r} needs {have} {what} but {key} allows {limit}")
