"""Measures :class:`~speccompile.tune.costs.LoadCosts` with the engine's own rounds.

Probe trees of growing size run through the round runner that serves requests, over requests made up for the
purpose: any tokens, an all-zero KV of the wanted length, features of an earlier round.  Times do not depend
on the values.  All sizes of all loads take turns, so that a disturbance of the machine hits a few samples of
each instead of all samples of one, and the first turn only warms up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from speccompile.limits import Limits
from speccompile.runtime.kv_blocks import NULL_BLOCK
from speccompile.runtime.output import Output
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.programs import KvCache, Program, ProgramSet
from speccompile.runtime.request import Pending, Request
from speccompile.runtime.round import RoundRunner
from speccompile.runtime.stats import SessionStats
from speccompile.tree.named import OFF
from speccompile.tree.table import table_of_one
from speccompile.tree.tree import Tree, tree_from_paths
from speccompile.tune.costs import LoadCosts, curve_of, round_calls

_NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
_KEPT = (1, 2, 4)
Load = tuple[int, int]
"""Active requests, and tokens that each of them has read."""


def probe_tree(nodes: int, width: int, depth: int) -> Tree:
    """``nodes`` drafts, half of them children of the root; the others spread evenly below those."""
    first = nodes if depth == 1 else min(width, (nodes + 1) // 2)
    below = [[i % first, i // first] for i in range(nodes - first)]
    return tree_from_paths([*([i] for i in range(first)), *below], name=f"probe-{nodes}")


def probe_trees(limits: Limits, batch: int) -> list[Tree]:
    """``off`` and the probes that ``batch`` requests may run at once."""
    width, depth = limits.draft_topk, limits.max_tree_depth
    room = min(limits.rows_per_request, limits.max_rows // batch) - 1
    most = min(room, width if depth == 1 else width + width**2)
    return [OFF, *(probe_tree(n, width, depth) for n in _NODES if n <= most)]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured round: seconds per program (summed over its calls) and of the host."""

    tree: Tree
    kept: int
    programs: dict[str, float]
    host: float


class Probe:
    """Runs made-up rounds over an engine's programs and caches, so no request may be running."""

    def __init__(self, programs: ProgramSet, kv: KvCache, *, temperature: float) -> None:
        self._limits, self._kv = programs.limits, kv
        self._seconds: dict[str, float] = {}
        self._runner = RoundRunner(self._recorded(programs), kv, SessionStats())
        self._params = SamplingParams(temperature=temperature, seed=0)
        self._feature: Tensor | None = None

    def measure(self, loads: Sequence[Load], *, repeats: int, worth: float) -> list[LoadCosts]:
        """Costs of every load.  ``worth``: tokens that no tree can exceed in a round.  Once a target call
        takes ``worth`` times that of ``off``, no larger tree can gain, and none is measured."""
        self._clear(loads)
        trees = [self._worthy(load, worth) for load in loads]
        samples: list[list[Sample]] = [[] for _ in loads]
        for _ in range(repeats):
            for load, wanted, found in zip(loads, trees, samples, strict=True):
                kept = _KEPT * len(wanted)
                found += [self._round(t, load, k) for t, k in zip(wanted, kept, strict=False)]
        return [load_costs(*load, found) for load, found in zip(loads, samples, strict=True)]

    def _worthy(self, load: Load, worth: float) -> list[Tree]:
        batch, context = load
        fitting = [
            t for t in probe_trees(self._limits, batch) if context + t.rows <= self._limits.max_seq_len
        ]
        plain = self._fastest(OFF, load)
        for number, tree in enumerate(fitting, 1):
            if self._fastest(tree, load) > worth * plain:
                return fitting[:number]
        return fitting

    def _fastest(self, tree: Tree, load: Load) -> float:
        """Seconds of the target call, the better of two: the first at a size may have to make room."""
        return min(self._round(tree, load, 1).programs["target_step"] for _ in range(2))

    def _recorded(self, programs: ProgramSet) -> ProgramSet:
        """The same programs; each adds its wall time to ``self._seconds``."""

        def recorded(name: str, program: Program) -> Program:
            def call(*inputs: object) -> tuple[Tensor, ...]:
                began = time.perf_counter()
                outputs = program(*inputs)
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
                return outputs

            return call

        assert programs.draft_extend is not None and programs.draft_step is not None
        return replace(
            programs,
            target_step=recorded("target_step", programs.target_step),
            accept=recorded("accept", programs.accept),
            draft_extend=recorded("draft_extend", programs.draft_extend),
            draft_step=recorded("draft_step", programs.draft_step),
        )

    def _clear(self, loads: Sequence[Load]) -> None:
        """Zero the blocks that :meth:`_round` uses: what lies there could be anything, and slow."""
        used = 1 + max(batch * self._blocks(context) for batch, context in loads)
        for layers in (*self._kv.target, *self._kv.draft):
            for layer in layers:
                layer[1:used] = 0

    def _blocks(self, context: int) -> int:
        """Blocks per request for a context and a round's rows."""
        slots = min(context + self._limits.rows_per_request, self._limits.max_seq_len)
        return -(-slots // self._limits.block_size)

    def _round(self, tree: Tree, load: Load, kept: int) -> Sample:
        batch, context = load
        if self._feature is None:
            self._feature = self._first_feature(context)
        requests = [self._request(number, tree, context, kept) for number in range(batch)]
        self._seconds.clear()
        began = time.perf_counter()
        self._runner.run(requests, [tree] * batch, [])
        total = time.perf_counter() - began
        programs = dict(self._seconds)
        host = total - sum(programs.values())
        return Sample(tree=tree, kept=min(kept, context), programs=programs, host=host)

    def _first_feature(self, context: int) -> Tensor:
        """What a target call returns, as many rows as the head may read from it."""
        request = self._request(0, OFF, context, 0)
        request.trees = table_of_one(probe_tree(1, 1, 1))  # so that it keeps its features
        self._runner.run([request], [OFF], [])
        return request.pending[0].feature[:1].expand(max(_KEPT), -1).contiguous()

    def _request(self, number: int, tree: Tree, context: int, kept: int) -> Request:
        limits, blocks = self._limits, self._blocks(context)
        request = Request(
            prompt=[number] * context,
            params=self._params,
            seed=number,
            trees=table_of_one(tree),
            max_new=limits.max_seq_len,
            max_seq_len=limits.max_seq_len,
            output=Output(stop_ids=(), stops=(), max_tokens=limits.max_seq_len, token_bytes=_no_text),
        )
        request.tokens.append(0)
        request.committed = context
        request.block_row = np.full(limits.blocks_per_request, NULL_BLOCK, np.int32)
        request.block_row[:blocks] = 1 + number * blocks + np.arange(blocks)
        if self._feature is not None:
            length = min(kept, context)
            request.pending = [Pending(context - length, np.arange(length, dtype=np.int64), self._feature)]
        return request


def load_costs(batch: int, context: int, samples: Sequence[Sample]) -> LoadCosts:
    """The curves of one load."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        tree, seconds = sample.tree, sample.programs
        found["target_step"][tree.rows].append(seconds["target_step"])
        found["accept"][tree.rows].append(seconds["accept"])
        found["host"][round_calls(tree)].append(sample.host)
        if tree.num_nodes:
            found["draft_extend"][sample.kept].append(seconds["draft_extend"])
        if tree.depth > 1:
            fed = int((tree.is_internal & (tree.depth_of_row == 1)).sum())
            found["draft_step"][fed].append(seconds["draft_step"])
    never = {1.0: [0.0]}  # of a program that no tree within the limits calls
    return LoadCosts(
        batch=batch,
        context=context,
        target_step=curve_of(found["target_step"]),
        accept=curve_of(found["accept"]),
        draft_extend=curve_of(found["draft_extend"] or never),
        draft_step=curve_of(found["draft_step"] or never),
        host=curve_of(found["host"]),
    )


def _no_text(_token: int) -> bytes:
    return b""
