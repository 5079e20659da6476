"""Padded training batches of sequences of similar length, in a seeded order.

Sequences are shuffled, sorted by length inside windows, and cut into batches of at most ``tokens``
positions (padding included), so that padding stays small and every batch costs about the same.
Legend: B sequences, T positions with a feature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speccompile.train.cache import SequenceRef

_WINDOW_BATCHES = 16


@dataclass(frozen=True)
class Batch:
    """``token`` i64 [B, T + 1], ``supervised`` bool [B, T + 1], ``hidden`` [B, T, h], ``feature`` [B, T, F],
    ``length`` i64 [B] (features of each sequence).  ``hidden`` feeds the teacher, ``feature`` the head."""

    token: Tensor
    supervised: Tensor
    hidden: Tensor
    feature: Tensor
    length: Tensor


def plan_epoch(refs: list[SequenceRef], tokens: int, max_length: int, seed: int) -> list[list[SequenceRef]]:
    """The batches of one epoch; the same arguments give the same plan."""
    generator = torch.Generator().manual_seed(seed)
    order = [refs[i] for i in torch.randperm(len(refs), generator=generator).tolist()]
    batches: list[list[SequenceRef]] = []
    mean = max(1, sum(min(r.features, max_length) for r in refs) // max(1, len(refs)))
    window = max(1, _WINDOW_BATCHES * tokens // mean)
    for start in range(0, len(order), window):
        batches += _cut(sorted(order[start : start + window], key=lambda r: r.features), tokens, max_length)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _cut(refs: list[SequenceRef], tokens: int, max_length: int) -> list[list[SequenceRef]]:
    batches: list[list[SequenceRef]] = [[]]
    for ref in refs:  # ascending, so the newest sequence sets the width
        if batches[-1] and (len(batches[-1]) + 1) * min(ref.features, max_length) > tokens:
            batches.append([])
        batches[-1].append(ref)
    return batches


def supervision(ids: Tensor, answer: Tensor, eos_ids: Tensor, prompts: bool) -> Tensor:
    """Which tokens are labels: answers up to their end token, or every token with ``prompts``."""
    if prompts:
        return torch.ones_like(answer)
    ended = answer & torch.isin(ids, eos_ids)
    supervised = answer.clone()
    supervised[1:] &= ~ended[:-1]
    return supervised
