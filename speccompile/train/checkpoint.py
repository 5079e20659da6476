"""The state of a run: everything that a resumed one needs to repeat the unbroken one bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speccompile.errors import ConfigError
from speccompile.train.config import TrainConfig
from speccompile.train.files import OutputError, write_atomically

STATE_FILE = "train_state.pt"


@dataclass
class Progress:
    """Where a run stands; saved with its state.

    ``batch`` counts the micro-batches done in the epoch.  ``eval_shards`` are the shards of the first epoch:
    their held-out sequences measure the whole run.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    shards: list[str] = field(default_factory=list)
    eval_shards: list[str] = field(default_factory=list)
    best: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What is saved: ``head`` holds the trainable weights in float32, ``target`` the digest of the target,
    ``shard_rows`` the rows of every shard seen so far."""

    config: dict[str, Any]
    progress: Progress
    token_ids: Tensor
    head: dict[str, Tensor]
    optimizer: dict[str, Any]
    target: str
    shard_rows: dict[str, int]

    def save(self, folder: Path) -> None:
        """Writes ``train_state.pt`` atomically; OutputError when the disk is full."""
        state = {**vars(self), "progress": vars(self.progress)}
        write_atomically(folder / STATE_FILE, lambda file: torch.save(state, file))

    @classmethod
    def load(cls, folder: Path, config: TrainConfig) -> RunState | None:
        """The state in ``folder``, None when there is none; ConfigError when its run had other settings."""
        path = folder / STATE_FILE
        if not path.is_file():
            return None
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
            raise OutputError(f"{path}: damaged state ({error}); train anew in another folder") from error
        if not isinstance(state, dict) or state.keys() != {f.name for f in fields(cls)}:
            raise OutputError(f"{path}: not the state of a run of this version; train anew in another folder")
        asked = config.to_json()
        changed = sorted(
            k for k in asked.keys() | state["config"].keys() if state["config"].get(k) != asked.get(k)
        )
        if changed:
            was = ", ".join(f"{k} {state['config'].get(k)!r}" for k in changed)
            raise ConfigError(f"{path}: that run had {was}; use the same settings or another output folder")
        return cls(**{**state, "progress": Progress(**state["progress"])})

    def check_same(self, target: str, shard_rows: dict[str, int], head: nn.Module) -> None:
        """ConfigError when the run had another target, other data or a head of another shape."""
        if self.target != target:
            raise ConfigError("--resume: that run trained for another target; give its --model")
        for name, rows in self.shard_rows.items():
            if shard_rows.get(name, rows) != rows:
                raise ConfigError(f"--resume: {name} is not the shard which that run read; give its --data")
        shapes = {name: p.shape for name, p in trainable(head).items()}
        if shapes != {name: p.shape for name, p in self.head.items()}:
            raise ConfigError("--resume: that run had a head of another shape; give the same --init")


def trainable(head: nn.Module) -> dict[str, Tensor]:
    """The weights that a run changes, by name."""
    return {name: p.detach() for name, p in head.named_parameters() if p.requires_grad}
