"""The rollout cache: a folder of safetensors shards with token ids, answer masks and target features.

A shard joins sequences end to end: ``ids`` i32 [N], ``mask`` u8 [N] (1 = answer token), ``off`` i64
[sequences + 1] (ranges in N).  Optional are ``hidden`` [N, h] (post-norm hidden state of the target at each
token), ``aux`` [N, A * h] (EAGLE-3 layer inputs), and per sequence ``seed`` i64 and ``temperature`` f32, the
law that the answers were drawn by.  The last token of a sequence has no feature (its row is zero): it is
only a label.  Metadata: ``target`` (digest of the model the features belong to) and ``aux_layers``; shards
without them are of unknown target.  Shards appear atomically, so a cache can be read while it grows.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from speccompile.errors import SpeccompileError

_FIELDS = ("ids", "mask", "off")
_FEATURES = ("hidden", "aux")
_HELD_OUT_IDS = 48


class CacheError(SpeccompileError):
    """A rollout cache is missing, damaged or unusable for the target it is used with."""


@dataclass(frozen=True)
class Rollout:
    """One sequence of n + 1 tokens: ``ids`` i64, ``answer`` bool, and if kept ``hidden`` [n, h], ``aux``
    [n, A * h]; ``seed`` and ``temperature`` of the answers where the target drew them."""

    ids: Tensor
    answer: Tensor
    hidden: Tensor | None = None
    aux: Tensor | None = None
    seed: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class SequenceRef:
    """Where a sequence lies (shard, rows), whether it is held out from training, and the law its answers
    were drawn by (None where the shard does not say)."""

    shard: Path
    begin: int
    end: int
    held_out: bool
    seed: int | None = None
    temperature: float | None = None

    @property
    def features(self) -> int:
        """Number of positions with a feature."""
        return self.end - self.begin - 1


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """``widths`` of the features a shard stores, the digest of their ``target`` and the ``aux_layers`` they
    come from (None where the shard does not say)."""

    widths: dict[str, int]
    target: str | None
    aux_layers: tuple[int, ...] | None


def write_shard(folder: Path, name: str, rollouts: list[Rollout], metadata: dict[str, str]) -> Path:
    """Writes one shard atomically as ``folder/name.safetensors``; CacheError when the disk is full."""
    lengths = torch.tensor([0, *(len(r.ids) for r in rollouts)])
    fields = {
        "ids": torch.cat([r.ids for r in rollouts]).to(torch.int32),
        "mask": torch.cat([r.answer for r in rollouts]).to(torch.uint8),
        "off": lengths.cumsum(0),
    }
    for field in _FEATURES:
        parts = [p for r in rollouts if (p := getattr(r, field)) is not None]
        if len(parts) == len(rollouts):
            fields[field] = torch.cat([torch.cat((p, p.new_zeros(1, p.shape[1]))) for p in parts])
    for field, dtype in (("seed", torch.int64), ("temperature", torch.float32)):
        values = [v for r in rollouts if (v := getattr(r, field)) is not None]
        if len(values) == len(rollouts):
            fields[field] = torch.tensor(values, dtype=dtype)
    path, part = folder / f"{name}.safetensors", folder / f"{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(save(fields, metadata))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            part.unlink(missing_ok=True)
        raise CacheError(f"{path}: cannot be written ({error}); shards written before are whole") from error
    return path


class RolloutCache:
    """Read access to a cache folder; token ids and masks stay in memory, features are read on demand."""

    def __init__(self, folder: Path, held_out_percent: int = 2) -> None:
        self.folder, self.held_out_percent = folder, held_out_percent
        self.refs: list[SequenceRef] = []
        self._open: dict[Path, safe_open] = {}
        self._sequences: dict[Path, list[SequenceRef]] = {}
        self._ids: dict[Path, tuple[Tensor, Tensor]] = {}
        self._info: dict[Path, ShardInfo] = {}
        self.refresh()
        if not self.refs:
            raise CacheError(f"{folder}: no rollout shards (*.safetensors); run `speccompile rollout` first")

    def refresh(self, only: list[str] | None = None) -> list[str]:
        """Lists shards that appeared since the last call (or just those named); returns all names in use."""
        names = only if only is not None else sorted(p.name for p in self.folder.glob("*.safetensors"))
        for name in names:
            if self.folder / name not in self._open:
                self._add(self.folder / name)
        self.refs = [ref for name in names for ref in self._sequences[self.folder / name]]
        return names

    def _add(self, path: Path) -> None:
        if not path.is_file():
            raise CacheError(f"{path}: no such shard; the run to resume had it, so give that run's --data")
        try:
            shard = safe_open(path, framework="pt")
            missing = set(_FIELDS) - set(shard.keys())
            if missing:
                raise CacheError(f"{path}: tensor {sorted(missing)[0]!r} is missing; not a rollout shard")
            ids, mask, off = (shard.get_tensor(name) for name in ("ids", "mask", "off"))
            law = [_per_sequence(shard, name, len(off) - 1) for name in ("seed", "temperature")]
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{path}: damaged shard ({error}); delete it") from error
        self._open[path], self._ids[path] = shard, (ids.long(), mask.bool())
        self._info[path], refs = _shard_info(shard), self._sequences.setdefault(path, [])
        for begin, end, seed, temperature in zip(off[:-1].tolist(), off[1:].tolist(), *law, strict=True):
            if end - begin >= 3:  # shorter ones hold no pair with a label
                held_out = self._held_out(ids[begin:end])
                refs.append(SequenceRef(path, begin, end, held_out, seed, temperature))

    def shard_rows(self) -> dict[str, int]:
        """Number of rows by shard name, of all shards read so far."""
        return {path.name: len(ids) for path, (ids, _) in self._ids.items()}

    def _held_out(self, ids: Tensor) -> bool:
        """By a hash of the first ids, so that answers to one prompt never sit on both sides."""
        head = ids[:_HELD_OUT_IDS].to(torch.int32).numpy().tobytes()
        return zlib.crc32(head) % 100 < self.held_out_percent

    def tokens(self, ref: SequenceRef) -> tuple[Tensor, Tensor]:
        """Ids i64 and answer mask of one sequence."""
        ids, mask = self._ids[ref.shard]
        return ids[ref.begin : ref.end], mask[ref.begin : ref.end]

    def shard(self, ref: SequenceRef) -> ShardInfo:
        """What the sequence's shard says of its features."""
        return self._info[ref.shard]

    def feature(self, ref: SequenceRef, field: str) -> Tensor:
        """``hidden`` or ``aux`` of one sequence, [n, width]."""
        return self._open[ref.shard].get_slice(field)[ref.begin : ref.end - 1]


def _per_sequence(shard: safe_open, name: str, count: int) -> list[Any]:
    return shard.get_tensor(name).tolist() if name in set(shard.keys()) else [None] * count


def _shard_info(shard: safe_open) -> ShardInfo:
    notes = shard.metadata() or {}
    layers = notes.get("aux_layers")
    return ShardInfo(
        widths={f: shard.get_slice(f).get_shape()[1] for f in _FEATURES if f in set(shard.keys())},
        target=notes.get("target"),
        aux_layers=None if layers is None else tuple(int(i) for i in layers.split(",") if i),
    )
