"""``tests/PROBES.md`` names tests that exist, for every probe."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBES = {
    "L": range(1, 20, 2),
    "B": range(1, 10, 2),
    "T": range(1, 10, 2),
    "S": range(1, 14, 2),
    "K": range(1, 10, 2),
    "V": range(1, 20, 2),
    "Q": range(1, 8, 2),
    "R": range(1, 12, 2),
}


def rows() -> list[tuple[str, str]]:
    """Probe and last column of each row of the table."""
    lines = (ROOT / "tests" / "PROBES.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(row[0], row[-1]) for row in cells[2:]]


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    for probe, where in rows():
        if where.startswith("later issue ("):
            continue
        match = re.fullmatch(r"(tests/\S+\.py)::(test_\w+)", where)
        assert match, f"{probe}: {where!r} is no node id"
        assert match[2] in functions_in(ROOT / match[1]), f"{probe}: {where} does not exist"


def test_every_probe_has_a_row() -> None:
    wanted = {f"{area}{number:02d}" for area, numbers in PROBES.items() for number in numbers}
    assert {probe for probe, _ in rows()} == wanted
