"""Named tensors on disk, whatever the container.

A :class:`TensorSource` lists the tensors of one model and hands them out one at a time, memory-mapped and
in the dtype of the file.  :func:`open_tensors` finds out what a folder holds.  Opening validates every
header and every file size, so that damage is reported before any weight is read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speccompile.errors import CheckpointError


class TensorSource(ABC):
    """The tensors of one checkpoint.  An unknown name raises :class:`CheckpointError` everywhere."""

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype that :meth:`get` returns, without reading the data."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """One tensor; treat it as read-only, its memory may be the mapped file."""

    @abstractmethod
    def where(self, name: str) -> str:
        """File name that holds (or should hold) the tensor, for messages."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Every weight file, for digests."""


class ShardedTensors(TensorSource):
    """Several one-file sources joined by an index file ``{"weight_map": {tensor: file}}``."""

    def __init__(self, index: Path, open_file: Callable[[Path], TensorSource]) -> None:
        self._index = index
        self._file_of = _weight_map(index)
        self._shards = {
            name: self._open_shard(name, open_file) for name in sorted(set(self._file_of.values()))
        }
        self._check_names()

    def _open_shard(self, file_name: str, open_file: Callable[[Path], TensorSource]) -> TensorSource:
        path = self._index.parent / file_name
        if not path.is_file():
            first = next(t for t, f in self._file_of.items() if f == file_name)
            raise CheckpointError(
                f"{path}: missing shard; {self._index.name} places {first!r} there; copy the file again"
            )
        return open_file(path)

    def _check_names(self) -> None:
        held = {file_name: set(shard.names()) for file_name, shard in self._shards.items()}
        for tensor, file_name in self._file_of.items():
            if tensor not in held[file_name]:
                raise CheckpointError(
                    f"{self._index.parent / file_name}: tensor {tensor!r} is missing although "
                    f"{self._index.name} places it there; copy the file again"
                )
        for file_name, names in held.items():
            extra = sorted(n for n in names if self._file_of.get(n) != file_name)
            if extra:
                raise CheckpointError(
                    f"{self._index.parent / file_name}: tensor {extra[0]!r} is not placed in this file by "
                    f"{self._index.name}; the shards and the index belong to different checkpoints"
                )

    def _shard(self, name: str) -> TensorSource:
        if name not in self._file_of:
            raise unknown_tensor(self._index, name)
        return self._shards[self._file_of[name]]

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._shard(name).dtype(name)

    def get(self, name: str) -> torch.Tensor:
        return self._shard(name).get(name)

    def where(self, name: str) -> str:
        return self._file_of.get(name, self._index.name)

    def files(self) -> list[Path]:
        return [self._index, *(self._index.parent / f for f in self._shards)]


def unknown_tensor(path: Path, name: str) -> CheckpointError:
    """The error for a name that no file of the checkpoint holds."""
    return CheckpointError(f"{path}: tensor {name!r} is missing; the checkpoint is incomplete")


def read_text(path: Path) -> str:
    """A UTF-8 file; :class:`CheckpointError` when it is missing or something else."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as UTF-8 text ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk; :class:`CheckpointError` when the file is missing or is not an object."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no 'weight_map'; not a shard index")
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: 'weight_map' places {tensor!r} in {file_name!r}, not a file name"
            )
    return weight_map


def open_tensors(path: Path) -> TensorSource:
    """Opens the weights of a folder (safetensors preferred to ``.bin``) or one weight file.

    Raises :class:`CheckpointError` when there is none, when it is ambiguous, or when a file is damaged.
    """
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    for stem, pattern in (
        ("model.safetensors", "*.safetensors"),
        ("pytorch_model.bin", "pytorch_model*.bin"),
    ):
        found = _find(path, stem, pattern)
        if found is not None:
            return _open_file(found)
    raise CheckpointError(f"{path}: no model.safetensors, no pytorch_model.bin and no index of either")


def _find(folder: Path, stem: str, pattern: str) -> Path | None:
    """The file to open among those of one container kind: the single file, its index, or the only match."""
    for candidate in (folder / stem, folder / f"{stem}.index.json"):
        if candidate.is_file():
            return candidate
    matches = sorted(folder.glob(pattern))
    if len(matches) > 1:
        raise CheckpointError(
            f"{folder}: {len(matches)} files {pattern} but no {stem}.index.json that joins them; "
            f"copy the index too"
        )
    return matches[0] if matches else None


def _open_file(path: Path) -> TensorSource:
    # Imported here because the containers import TensorSource from this module.
    from speccompile.checkpoint.safetensors_source import SafetensorsFile
    from speccompile.checkpoint.torch_source import TorchFile

    kinds: dict[str, Callable[[Path], TensorSource]] = {
        ".safetensors": SafetensorsFile,
        ".bin": TorchFile,
        ".safetensors.index.json": lambda p: ShardedTensors(p, SafetensorsFile),
        ".bin.index.json": lambda p: ShardedTensors(p, TorchFile),
    }
    for suffix, opener in kinds.items():
        if path.name.endswith(suffix):
            return opener(path)
    raise CheckpointError(f"{path}: not a weight file; expected one of {', '.join(kinds)}")
