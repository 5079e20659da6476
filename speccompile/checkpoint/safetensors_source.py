"""One ``.safetensors`` file as a :class:`TensorSource`.

The header is parsed and checked here, against the size of the file, so that a truncated copy is reported with
the first tensor it cuts; the data are then mapped by the ``safetensors`` library.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from speccompile.checkpoint.tensors import TensorSource, unknown_tensor
from speccompile.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    end: int


class SafetensorsFile(TensorSource):
    """A single file; opening checks header, dtypes, sizes and the length of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = _read_entries(path)
        try:
            self._handle: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise unknown_tensor(self._path, name)
        return self._entries[name]

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def get(self, name: str) -> torch.Tensor:
        self._entry(name)
        return self._handle.get_tensor(name)

    def where(self, name: str) -> str:  # noqa: ARG002
        return self._path.name

    def files(self) -> list[Path]:
        return [self._path]


def _read_entries(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path}: truncated or not a safetensors file ({size} bytes); copy it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, item) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: bad safetensors header ({error!r}); copy the file again") from error
    _check_length(path, entries, size - 8 - length)
    return entries


def _entry(path: Path, name: str, item: dict[str, Any]) -> _Entry:
    begin, end = item["data_offsets"]
    dtype = _DTYPES.get(item["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {item['dtype']!r}, which is not supported")
    shape = tuple(int(d) for d in item["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise CheckpointError(
            f"{path}: tensor {name!r} has {end - begin} bytes, which does not fit shape {list(shape)} of "
            f"{item['dtype']}; copy the file again"
        )
    return _Entry(dtype, shape, end)


def _check_length(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    for name, entry in entries.items():
        if entry.end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end} of the data, but only "
                f"{data_bytes} are there; copy the file again"
            )
    expected = max((e.end for e in entries.values()), default=0)
    if expected != data_bytes:
        raise CheckpointError(
            f"{path}: {data_bytes - expected} bytes after the last tensor; copy the file again"
        )
