"""One PyTorch ``.bin`` file as a :class:`TensorSource`.

Only ``torch.load(weights_only=True, mmap=True)`` is used: no code of the file runs, and the data stay on disk
until they are read.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from speccompile.checkpoint.tensors import TensorSource, unknown_tensor
from speccompile.errors import CheckpointError


class TorchFile(TensorSource):
    """A single state dict; anything in it that is not a tensor is an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = _load(path)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise unknown_tensor(self._path, name)
        return self._tensors[name]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def get(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def where(self, name: str) -> str:  # noqa: ARG002
        return self._path.name

    def files(self) -> list[Path]:
        return [self._path]


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: not loadable as a plain state dict ({reason}); it is damaged, holds code, or uses the "
            f"format older than PyTorch 1.6: save it as safetensors"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: entry {name!r} is not a tensor; only plain state dicts are read")
    return state
