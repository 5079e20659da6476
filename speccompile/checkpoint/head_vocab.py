"""The reduced draft vocabulary: ``d2t`` offsets and their check against ``t2d``.

``target_id = i + d2t[i]`` (EAGLE-3 reference code).  Files that hold absolute ids, or a counter, in place of
offsets are refused, because they would only lower acceptance and never fail.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccompile.errors import CheckpointError

_INTEGERS = (torch.int64, torch.int32, torch.int16)


def draft_offsets(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab: int, vocab: int, where: str
) -> Tensor | None:
    """Validated int64 offsets [draft_vocab]; None for a full draft vocabulary (the identity).

    Without ``d2t``, a ``t2d`` mask with exactly ``draft_vocab`` True values gives the map.
    """
    if not 0 < draft_vocab <= vocab:
        raise CheckpointError(
            f"{where}: draft vocabulary of {draft_vocab} entries for a vocabulary of {vocab}"
        )
    kept = _kept_ids(t2d, draft_vocab, vocab, where)
    if d2t is None:
        d2t = _offsets_of(kept, draft_vocab, vocab, where)
    ids = _target_ids(d2t, draft_vocab, vocab, where)
    if kept is not None and not torch.equal(kept, ids):
        raise CheckpointError(
            f"{where}: d2t (offsets: target id - draft id) and t2d select different target ids{_hint(d2t)}"
        )
    if kept is None and _looks_absolute(d2t):
        raise CheckpointError(f"{where}: d2t must hold offsets (target id - draft id){_hint(d2t)}")
    return None if draft_vocab == vocab else d2t.to(torch.int64)


def _kept_ids(t2d: Tensor | None, draft_vocab: int, vocab: int, where: str) -> Tensor | None:
    """Target ids that ``t2d`` marks; None when it says nothing (absent, or all ones, SpecForge's start)."""
    if t2d is None:
        return None
    if t2d.shape != (vocab,):
        raise CheckpointError(
            f"{where}: t2d has shape {list(t2d.shape)}, expected [{vocab}] (the vocabulary)"
        )
    kept = t2d.bool().nonzero().flatten()
    if len(kept) == draft_vocab:
        return kept
    if len(kept) == vocab:
        return None
    raise CheckpointError(
        f"{where}: t2d has {len(kept)} True values, but the draft vocabulary has {draft_vocab} entries; the "
        f"head was built with a wrong vocabulary mapping"
    )


def _offsets_of(kept: Tensor | None, draft_vocab: int, vocab: int, where: str) -> Tensor:
    if draft_vocab == vocab:
        return torch.zeros(vocab, dtype=torch.int64)
    if kept is None:
        raise CheckpointError(
            f"{where}: tensor 'd2t' is missing, but the draft vocabulary ({draft_vocab}) is smaller than the "
            f"vocabulary ({vocab}); export the head with its vocabulary mapping"
        )
    return kept - torch.arange(draft_vocab)


def _target_ids(d2t: Tensor, draft_vocab: int, vocab: int, where: str) -> Tensor:
    if d2t.dtype not in _INTEGERS:
        raise CheckpointError(f"{where}: d2t is {d2t.dtype}; ids lose precision there, store it as int64")
    if d2t.shape != (draft_vocab,):
        raise CheckpointError(
            f"{where}: d2t has shape {list(d2t.shape)}, expected [{draft_vocab}] (the draft vocabulary)"
        )
    ids = d2t.to(torch.int64) + torch.arange(draft_vocab)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise CheckpointError(
            f"{where}: d2t reaches target ids {low} to {high}, outside 0 to {vocab - 1}{_hint(d2t)}"
        )
    if bool((ids.diff() <= 0).any()):
        first = int((ids.diff() <= 0).nonzero()[0]) + 1
        raise CheckpointError(
            f"{where}: d2t maps draft id {first} to target id {int(ids[first])}, which does not follow "
            f"{int(ids[first - 1])}; target ids must increase{_hint(d2t)}"
        )
    return ids


def _looks_absolute(d2t: Tensor) -> bool:
    """Offsets of a real vocabulary repeat wherever two kept ids are neighbours; absolute ids never repeat.

    A step of exactly one tells absolute ids (and counters) from an evenly thinned vocabulary.
    """
    steps = d2t.diff()
    return bool((steps == 1).any()) and bool((steps >= 1).all())


def _hint(d2t: Tensor) -> str:
    return "; it looks like absolute ids" if bool((d2t.diff() >= 1).all()) else ""
