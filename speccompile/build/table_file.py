"""The tuned tree table inside an engine directory: ``trees/table.json``.

Tuning happens after the build, and again, so the manifest does not list this file.  It carries what the
manifest would say: a digest over its content, and the digest of the engine it was measured on.  It is
replaced by one rename.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from speccompile.build.manifest import Manifest, json_digest
from speccompile.errors import ConfigError, EngineError
from speccompile.tree.table import TreeTable, table_from_json

TABLE_PATH = "trees/table.json"
TABLE_FORMAT = 1
_KEYS = {"format", "engine", "table", "report", "digest"}


def write_table(engine: Path, manifest: Manifest, table: TreeTable, report: dict[str, Any]) -> None:
    """Store ``table``, in the place of an older one; ``report`` is plain JSON about where it comes from.

    Raises EngineError when the folder cannot be written; what was there stays.
    """
    path = engine / TABLE_PATH
    data = {
        "format": TABLE_FORMAT,
        "engine": manifest.to_json()["digest"],
        "table": table.to_json(),
        "report": json.loads(json.dumps(report)),
    }
    text = json.dumps({**data, "digest": json_digest(data)}, indent=1) + "\n"
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EngineError(f"{path}: cannot be written ({error})") from error


def read_table(engine: Path, manifest: Manifest) -> tuple[TreeTable, dict[str, Any]] | None:
    """The table and its report, or None where there is none.

    Raises EngineError for a file that is damaged or was made for another engine.
    """
    path = engine / TABLE_PATH
    remedy = "run `speccompile tune` again, or remove the file"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error}); {remedy}") from error
    if not isinstance(data, dict) or set(data) != _KEYS or data["format"] != TABLE_FORMAT:
        raise EngineError(f"{path}: not a tree table of format {TABLE_FORMAT}; {remedy}")
    if data.pop("digest") != json_digest(data):
        raise EngineError(f"{path}: changed since it was tuned (digest differs); {remedy}")
    if data["engine"] != manifest.to_json()["digest"]:
        raise EngineError(f"{path}: tuned for another engine; {remedy}")
    try:
        return table_from_json(data["table"]), data["report"]
    except ConfigError as error:
        raise EngineError(f"{path}: {error}; {remedy}") from error
