"""The reduced draft vocabulary: the tokens that the target's answers use most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speccompile.errors import ConfigError


def choose_draft_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Sorted target ids, i64 [size], of the most frequent tokens; ``counts`` i64 [V] over answers.

    ``always`` (end-of-turn and other special ids) are kept whatever their count.  When fewer than ``size``
    tokens occur, the lowest unused ids fill up; ties go to the lower id, so the choice is deterministic.
    """
    vocab = len(counts)
    kept = sorted(set(always))
    if not len(kept) < size <= vocab:
        raise ConfigError(
            f"draft_vocab_size {size}: must be more than the {len(kept)} special tokens and at most {vocab}, "
            f"the target's vocabulary"
        )
    rank = counts.clone()
    rank[kept] = counts.max() + 1
    order = torch.argsort(rank, descending=True, stable=True)
    return order[:size].sort().values
