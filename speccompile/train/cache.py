"""The rollout cache: a folder of safetensors shards with token ids, answer mask and target features.

A shard joins sequences end to end: ``ids`` i32 [N], ``mask`` u8 [N] (1 = answer token), ``off`` i64
[sequences + 1] (ranges in N), ``hidden`` [N, h] (post-norm hidden state of the target at each token) and
``aux`` [N, A * h] (EAGLE-3 layer inputs).  The last token of a sequence has no feature (its row is zero):
it is only a label.  Shards appear atomically, so a cache can be read while it grows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speccompile.errors import SpeccompileError

_FIELDS = ("ids", "mask", "off", "hidden")
_HELD_OUT_IDS = 48


class CacheError(SpeccompileError):
    """A rollout cache is missing, damaged or unusable for the target it is used with."""


@dataclass(frozen=True)
class Rollout:
    """One sequence of n + 1 tokens: ``ids`` i64, ``answer`` bool, ``hidden`` [n, h], ``aux`` [n, A * h]."""

    ids: Tensor
    answer: Tensor
    hidden: Tensor
    aux: Tensor


@dataclass(frozen=True)
class SequenceRef:
    """Where a sequence lies: its shard, its rows, and whether it is held out from training."""

    shard: Path
    begin: int
    end: int
    held_out: bool

    @property
    def features(self) -> int:
        """Number of positions with a feature."""
        return self.end - self.begin - 1


def write_shard(folder: Path, name: str, rollouts: list[Rollout], metadata: dict[str, str]) -> Path:
    """Writes one shard atomically as ``folder/name.safetensors``."""

    def joined(field: str) -> Tensor:
        parts = [getattr(r, field) for r in rollouts]
        return torch.cat([torch.cat((p, p.new_zeros(1, p.shape[1]))) for p in parts])

    lengths = torch.tensor([0, *(len(r.ids) for r in rollouts)])
    fields = {
        "ids": torch.cat([r.ids for r in rollouts]).to(torch.int32),
        "mask": torch.cat([r.answer for r in rollouts]).to(torch.uint8),
        "off": lengths.cumsum(0),
        "hidden": joined("hidden"),
        "aux": joined("aux"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.safetensors", folder / f"{name}.part"
    save_file(fields, part, metadata)
    part.replace(path)
    return path


class RolloutCache:
    """Read access to a cache folder; token ids and masks stay in memory, features are read on demand."""

    def __init__(self, folder: Path, held_out_percent: int = 2) -> None:
        self.folder, self.held_out_percent = folder, held_out_percent
        self.refs: list[SequenceRef] = []
        self._open: dict[Path, safe_open] = {}
        self._ids: dict[Path, tuple[Tensor, Tensor]] = {}
        self.refresh()
        if not self.refs:
            raise CacheError(f"{folder}: no rollout shards (*.safetensors); run `speccompile rollout` first")

    def refresh(self, only: list[str] | None = None) -> list[str]:
        """Lists shards that appeared since the last call (or just those named); returns all names in use."""
        names = only if only is not None else sorted(p.name for p in self.folder.glob("*.safetensors"))
        for name in names:
            if self.folder / name not in self._open:
                self._add(self.folder / name)
        order = {self.folder / name: i for i, name in enumerate(names)}
        self.refs = [r for r in self.refs if r.shard in order]
        self.refs.sort(key=lambda r: (order[r.shard], r.begin))
        return names

    def _add(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
            missing = set(_FIELDS) - set(shard.keys())
            if missing:
                raise CacheError(f"{path}: tensor {sorted(missing)[0]!r} is missing; not a rollout shard")
            ids, mask, off = (shard.get_tensor(name) for name in ("ids", "mask", "off"))
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{path}: damaged shard ({error}); delete it") from error
        self._open[path], self._ids[path] = shard, (ids.long(), mask.bool())
        for begin, end in zip(off[:-1].tolist(), off[1:].tolist(), strict=True):
            if end - begin >= 3:  # shorter ones hold no pair with a label
                self.refs.append(SequenceRef(path, begin, end, self._held_out(ids[begin:end])))

    def _held_out(self, ids: Tensor) -> bool:
        """By a hash of the first ids, so that answers to one prompt never sit on both sides."""
        head = ids[:_HELD_OUT_IDS].to(torch.int32).numpy().tobytes()
        return zlib.crc32(head) % 100 < self.held_out_percent

    def tokens(self, ref: SequenceRef) -> tuple[Tensor, Tensor]:
        """Ids i64 and answer mask of one sequence."""
        ids, mask = self._ids[ref.shard]
        return ids[ref.begin : ref.end], mask[ref.begin : ref.end]

    def feature(self, ref: SequenceRef, field: str) -> Tensor:
        """``hidden`` or ``aux`` of one sequence, [n, width]."""
        return self._open[ref.shard].get_slice(field)[ref.begin : ref.end - 1]

    @property
    def hidden_size(self) -> int:
        """Width of ``hidden``."""
        return self._open[self.refs[0].shard].get_slice("hidden").get_shape()[1]
