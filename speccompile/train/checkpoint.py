"""The state of a run: everything that a resumed one needs to repeat the unbroken one bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
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
    """What is saved: ``head`` holds the trainable weights in float32."""

    config: dict[str, Any]
    progress: Progress
    token_ids: Tensor
    head: dict[str, Tensor]
    optimizer: dict[str, Any]

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
        asked = config.to_json()
        changed = sorted(
            k for k in asked.keys() | state["config"].keys() if state["config"].get(k) != asked.get(k)
        )
        if changed:
            was = ", ".join(f"{k} {state['config'].get(k)!r}" for k in changed)
            raise ConfigError(f"{path}: that run had {was}; use the same settings or another output folder")
        return cls(**{**state, "progress": Progress(**state["progress"])})


def trainable(head: nn.Module) -> dict[str, Tensor]:
    """The weights that a run changes, by name."""
    return {name: p.detach() for name, p in head.named_parameters() if p.requires_grad}
