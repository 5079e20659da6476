"""``log.jsonl`` of a run: one JSON record per optimizer step and per evaluation, in order of steps.

A resumed run cuts the file at its checkpoint, so that no step appears twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speccompile.train.files import OutputError, write_atomically, write_error

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends records to the log of ``folder``; the file appears with the first one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE
        self._started = False

    def cut(self, step: int) -> None:
        """Keeps the records up to ``step`` and appends from now on."""
        kept = [json.dumps(r) + "\n" for r in read_log(self.path) if r["step"] <= step]
        write_atomically(self.path, lambda file: file.write("".join(kept).encode()))
        self._started = True

    def __call__(self, record: dict[str, Any]) -> None:
        """Appends one record; a log of an earlier run in the folder is replaced by the first."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self._started else "w", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise write_error(self.path, error) or error from error
        self._started = True


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that a kill cut short is left out.  Empty without a file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1] if line]
    except ValueError as error:
        raise OutputError(f"{path}: damaged ({error}); delete the line that is not JSON") from error
