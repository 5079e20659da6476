"""What a round costs at one load, from measured program times.

A round is ``draft_extend``, one ``draft_step`` per further depth, ``target_step``, ``accept`` and the host's
own work.  Each has a curve of seconds over what it grows with; between measured points it is a straight line,
beyond the last one the last line goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from speccompile.tree.tree import Tree


@dataclass(frozen=True)
class Curve:
    """``seconds`` at ascending sizes ``x``, at least one."""

    x: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, x: float) -> float:
        """Seconds at ``x``; a larger ``x`` than measured continues the last segment, if it rises."""
        if len(self.x) == 1 or x <= self.x[-1]:
            return float(np.interp(x, self.x, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.x[-1] - self.x[-2])
        return self.seconds[-1] + max(0.0, slope) * (x - self.x[-1])


def curve_of(samples: Mapping[float, list[float]]) -> Curve:
    """The lower quartiles of ``samples`` by size: what else runs on a machine only ever adds time."""
    sizes = sorted(samples)
    return Curve(tuple(sizes), tuple(float(np.quantile(samples[size], 0.25)) for size in sizes))


@dataclass(frozen=True, kw_only=True)
class LoadCosts:
    """Costs at ``batch`` active requests of ``context`` tokens each.

    ``target_step`` and ``accept`` over the rows of one request's tree, ``draft_extend`` over the tokens kept
    per request in the round before, ``draft_step`` over the fed nodes of one request, ``host`` over the
    program calls of the round.
    """

    batch: int
    context: int
    target_step: Curve
    accept: Curve
    draft_extend: Curve
    draft_step: Curve
    host: Curve

    def round_seconds(self, tree: Tree, kept: float) -> float:
        """One round of ``tree`` by every request; ``kept``: tokens per request and round, on average."""
        seconds = self.target_step.at(tree.rows) + self.accept.at(tree.rows)
        fed = [int((tree.is_internal & (tree.depth_of_row == d)).sum()) for d in range(1, tree.depth)]
        if tree.num_nodes:
            seconds += self.draft_extend.at(kept) + sum(map(self.draft_step.at, fed))
        return seconds + self.host.at(round_calls(tree))


def round_calls(tree: Tree) -> int:
    """Program calls of a round: 2 for ``off``, else ``draft_extend`` and ``depth`` - 1 steps more."""
    return 2 + tree.depth
