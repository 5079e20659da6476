"""A bounded folder of computed target features, one file per text.

An entry is found by a hash of what it was computed from: the token ids (which carry data, tokenizer and chat
template), the target's digest, the aux layers and the dtype; so nothing goes stale and runs may share a
folder.  When the folder is full nothing more is stored, because epochs read everything in turn: evicting the
oldest entry would evict the one needed next.  Files appear atomically and carry a checksum.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from speccompile.errors import ConfigError

_SUFFIX = ".features"
_HEADER_BYTES = 512


@dataclass(frozen=True)
class TextFeatures:
    """Of n tokens of a text: ``hidden`` (post-norm) [n, h] and ``aux`` (inputs of A layers) [n, A * h]."""

    hidden: Tensor
    aux: Tensor


class FeatureCache:
    """At most ``max_bytes`` of entries below ``folder``.

    Each process counts what it found at the start and what it wrote itself, so give every rank of a parallel
    run its share of the bytes.  A damaged entry is dropped with a warning and computed again; on a full
    disk a warning says that nothing more is stored, and the run goes on.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"{folder}: a feature cache of {max_bytes} bytes; give at least 1")
        self.folder, self.max_bytes = folder, max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: the feature cache cannot be made there ({error})") from error
        self.used_bytes = sum(p.stat().st_size for p in folder.glob(f"*/*{_SUFFIX}"))
        self.hits = self.misses = 0
        self._full = False

    def get(self, key: str) -> TextFeatures | None:
        """What was stored under ``key``; None when there is nothing, or nothing sound."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as entry:
                found = TextFeatures(entry.get_tensor("hidden"), entry.get_tensor("aux"))
                sound = (entry.metadata() or {}).get("crc32") == _checksum(found)
        except FileNotFoundError:
            self.misses += 1
            return None
        except (SafetensorError, OSError):
            sound = False
        if not sound:
            self.misses += 1
            self._drop(path)
            return None
        self.hits += 1
        return found

    def put(self, key: str, features: TextFeatures) -> None:
        """Stores an entry unless the bound or the disk is reached."""
        stored = TextFeatures(features.hidden.cpu().contiguous(), features.aux.cpu().contiguous())
        fields = {"hidden": stored.hidden, "aux": stored.aux}
        size = _HEADER_BYTES + sum(t.nbytes for t in fields.values())
        if self._full or self.used_bytes + size > self.max_bytes:
            return
        data = save(fields, {"crc32": _checksum(stored)})
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._full = True
            warnings.warn(f"{self.folder}: the disk is full; features are no longer stored", stacklevel=2)
        else:
            self.used_bytes += len(data)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key[2:]}{_SUFFIX}"

    def _drop(self, path: Path) -> None:
        warnings.warn(f"{path}: damaged feature entry; dropped and computed again", stacklevel=3)
        self.used_bytes -= path.stat().st_size if path.exists() else 0
        path.unlink(missing_ok=True)


def feature_key(ids: Tensor, target_digest: str, aux_layers: tuple[int, ...], dtype: torch.dtype) -> str:
    """Hex name of the features of ``ids`` i64 [n]."""
    digest = hashlib.sha256(f"{target_digest} {list(aux_layers)} {dtype} ".encode())
    digest.update(ids.cpu().to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _checksum(features: TextFeatures) -> str:
    value = 0
    for tensor in (features.hidden, features.aux):
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
