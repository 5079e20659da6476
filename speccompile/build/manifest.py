"""The engine's manifest: what an engine directory holds, what made it and what it needs to run.

``manifest.json`` is written last and read first.  Reading is strict: a missing or unknown key, another
format version or an edited file (the manifest carries its own digest) is an EngineError.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from speccompile.build.config import ResolvedConfig, config_from_manifest
from speccompile.checkpoint.config import HeadConfig, LlamaConfig, head_from_json, llama_from_json
from speccompile.errors import EngineError
from speccompile.files import FileDigest

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """What 8-bit weights cost the target, on the texts of ``calibration`` (a file, or ``built-in texts``).

    ``mean_kl``: KL(unquantized || quantized) of the next-token distributions, nats per position.
    ``top1_agreement``: part of the positions where both rank the same token first.  ``kept``: matrices that
    keep the engine's dtype.
    """

    calibration: str
    positions: int
    mean_kl: float
    top1_agreement: float
    kept: tuple[str, ...]

    def summary(self) -> str:
        """One line for people."""
        return (
            f"int8 against unquantized: KL {self.mean_kl:.4f} nats, top-1 agreement {self.top1_agreement:.1%}"
            f" ({self.positions} positions of {self.calibration})"
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One engine.  Sizes are in bytes, times in seconds, paths POSIX and relative (to engine or source)."""

    format_version: int
    contract: dict[str, Any]
    config: ResolvedConfig
    target: LlamaConfig
    head: HeadConfig | None
    quantization: QuantizationReport | None
    sources: tuple[FileDigest, ...]
    files: tuple[FileDigest, ...]
    versions: dict[str, str]
    machine: str
    cpu_features: tuple[str, ...]
    argv: tuple[str, ...]
    git_sha: str | None
    created: str
    peak_memory: int
    times: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with ``digest`` over everything else."""
        data = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**data, "digest": json_digest(data)}

    def write(self, engine: Path) -> None:
        """Write ``manifest.json`` into an engine directory."""
        (engine / MANIFEST_NAME).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def json_digest(data: dict[str, Any]) -> str:
    """SHA-256 over plain JSON, however it is laid out; hex."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(engine: Path) -> Manifest:
    """Read and check ``engine/manifest.json``; EngineError names the file and the remedy."""
    path = engine / MANIFEST_NAME
    data = _read_json(path)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise EngineError(
            f"{path}: engine format {version!r}, this version reads {FORMAT_VERSION}; build the engine again"
        )
    names = {f.name for f in dataclasses.fields(Manifest)} | {"digest"}
    if names != set(data):
        wrong = ", ".join(sorted(names ^ set(data)))
        raise EngineError(f"{path}: missing or unknown keys: {wrong}; build the engine again")
    if data.pop("digest") != json_digest(data):
        raise EngineError(f"{path}: changed since it was built (digest differs); build the engine again")
    try:
        return _from_json(data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise EngineError(f"{path}: wrong content ({error}); build the engine again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise EngineError(f"{path.parent}: no such engine directory; make one with `speccompile build`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{path.parent}: not an engine directory ({MANIFEST_NAME} is missing)") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error}); build the engine again") from error
    if not isinstance(data, dict):
        raise EngineError(f"{path}: not a JSON object; build the engine again")
    return data


def _quantization(data: dict[str, Any]) -> QuantizationReport:
    return QuantizationReport(**{**data, "kept": tuple(data["kept"])})


def _from_json(data: dict[str, Any]) -> Manifest:
    head, quantization = data["head"], data["quantization"]
    files = tuple(FileDigest(**item) for item in data["files"])
    converted = {
        "config": config_from_manifest(data["config"]),
        "target": llama_from_json(data["target"]),
        "head": None if head is None else head_from_json(head),
        "quantization": None if quantization is None else _quantization(quantization),
        "sources": tuple(FileDigest(**item) for item in data["sources"]),
        "files": files,
        "cpu_features": tuple(data["cpu_features"]),
        "argv": tuple(data["argv"]),
    }
    for item in files:
        parts = PurePosixPath(item.path)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"file path {item.path!r} leaves the engine")
    return Manifest(**{**data, **converted})
