"""Data-parallel training under torchrun: plain sums of gradients, no wrapper around the head.

Process r of n takes micro-batches r, r+n, ... of every optimizer step; sums over processes and over
micro-batches are the same sums, so 1 and n processes train the same head up to rounding.  gloo on CPUs; NCCL
on CUDA devices is written and was not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from speccompile.errors import ConfigError

# Evaluation and rollouts run in process 0 while the others wait.
_PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Joins the processes that torchrun started (``RANK``, ``WORLD_SIZE``, ...); alone without it."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
        return cls(dist.get_rank(), world)

    @staticmethod
    def local_rank() -> int:
        """Number of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def leads(self) -> bool:
        """Whether this process writes and logs."""
        return self.rank == 0

    def check_accumulate(self, accumulate: int) -> None:
        """ConfigError unless every process gets the same number of micro-batches."""
        if accumulate % self.world:
            fitting = -(-accumulate // self.world) * self.world
            raise ConfigError(
                f"accumulate {accumulate}: must be a multiple of the {self.world} processes; give "
                f"--accumulate {fitting} or another number of processes"
            )

    def share(self, items: list) -> list:
        """This process's micro-batches of a step."""
        return items[self.rank :: self.world]

    def add(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sums the gradients; a process without a micro-batch adds zeros."""
        if self.world == 1:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors with those of process 0."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def agree(self, names: list[str]) -> list[str]:
        """Process 0's list, everywhere."""
        if self.world == 1:
            return names
        box = [names]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Ends the process group."""
        if self.world > 1:
            dist.destroy_process_group()
