"""Acceptance from a statistics file instead of a run: the JSON of ``speccompile eval-draft --json``.

It holds, per group of texts, the share of rounds that accept a draft of each rank at each depth.  Rank
vectors with these shares are drawn at random, as if the ranks along an accepted path did not depend on each
other, and serve like measured ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.errors import ConfigError
from speccompile.tree.replay import NOT_DRAFTED, RankTable

_ROWS = 8192


def read_statistics(path: Path, *, max_depth: int, draft_topk: int) -> RankTable:
    """Rank vectors no deeper and no wider than an engine drafts.  Raises ConfigError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        shares, weights = zip(*map(_group, data["groups"]), strict=True)
        marginal_DK = np.average(np.array(shares, np.float64), axis=0, weights=weights)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not the statistics that `speccompile eval-draft --json` prints ({error})"
        ) from error
    marginal_DK = marginal_DK[:max_depth, :draft_topk]
    reached_D = np.concatenate([[1.0], marginal_DK.sum(1)[:-1]])
    if not (marginal_DK >= 0).all() or (marginal_DK.sum(1) > reached_D * (1 + 1e-6)).any():
        raise ConfigError(f"{path}: ranks.marginal holds no shares of rounds: a draft follows its parent")
    return sampled_table(marginal_DK / np.maximum(reached_D, 1e-12)[:, None], _ROWS)


def _group(group: Any) -> tuple[list[list[float]], int]:
    return group["ranks"]["marginal"], group["positions"]


def sampled_table(conditional_DK: NDArray[np.float64], rows: int) -> RankTable:
    """``rows`` independent rank vectors; ``conditional`` [D, K]: share of each rank once the parent is
    accepted.  The same every time."""
    depth, width = conditional_DK.shape
    draw_ND = np.random.default_rng(0).random((rows, depth))
    rank_ND = (draw_ND[:, :, None] >= np.cumsum(conditional_DK, axis=1)).sum(2)
    listed = np.logical_and.accumulate(rank_ND < width, axis=1)
    return RankTable(
        rank=np.where(listed, rank_ND, NOT_DRAFTED).astype(np.uint8),
        left=np.full(rows, depth + 1, np.int32),
        position=np.ones(rows, np.int32),
    )
