"""One round: the program calls that move every active request forward.

The head catches up and proposes (:mod:`speccompile.runtime.draft`), the target scores trees and prompt
chunks together and ``accept`` walks (:mod:`speccompile.runtime.verify`); then each request keeps what
its walk brought.  Nothing here loops over nodes, and one transfer brings the result to the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from speccompile.runtime.batch import CausalLayouts
from speccompile.runtime.draft import Drafter
from speccompile.runtime.forest import make_forest
from speccompile.runtime.members import Chunk, Members
from speccompile.runtime.programs import KvCache, Program, ProgramSet
from speccompile.runtime.request import Request
from speccompile.runtime.stats import SessionStats
from speccompile.runtime.verify import Verifier, Walk
from speccompile.tree.tree import Tree


class RoundRunner:
    """Runs rounds over one KV cache."""

    def __init__(self, programs: ProgramSet, kv: KvCache, stats: SessionStats) -> None:
        timed = _timed(programs, stats)
        causal = CausalLayouts(programs.limits.max_rows)
        self._limits, self._stats = programs.limits, stats
        self._drafter = Drafter(timed, kv, causal)
        self._verifier = Verifier(timed, kv, causal)

    def run(self, decoding: Sequence[Request], trees: Sequence[Tree], chunks: Sequence[Chunk]) -> None:
        """Move every given request forward; ``trees`` [decoding] and chunks fit into ``max_rows`` rows."""
        fitting = tuple(request.round_tree(tree) for request, tree in zip(decoding, trees, strict=True))
        forest = make_forest(fitting, self._limits.draft_topk, self._limits.mask_words)
        members = Members(decoding, chunks, forest)
        candidates = self._drafter.propose(members)
        walks, feature = self._verifier.verify(members, candidates)
        reading = set(members.readers.tolist())
        for index, walk in enumerate(walks):
            self._apply(walk, feature, head_read=index in reading)

    def _apply(self, walk: Walk, feature: Tensor, *, head_read: bool) -> None:
        request, decoding = walk.request, not walk.request.prompt_left
        request.commit(walk.rows, feature, head_read=head_read)
        if not walk.drawn:
            return
        kept = request.keep(walk.drawn)
        if decoding:
            accepted = min(kept, len(walk.drawn) - 1)
            request.counts.add(kept=kept, accepted=accepted)
            self._stats.counts.add(kept=kept, accepted=accepted)


def _timed(programs: ProgramSet, stats: SessionStats) -> ProgramSet:
    """The same programs, adding their wall time to ``stats.program_s``."""

    def timed(program: Program) -> Program:
        def call(*inputs: object) -> tuple[Tensor, ...]:
            began = time.perf_counter()
            outputs = program(*inputs)
            stats.program_s += time.perf_counter() - began
            return outputs

        return call

    return replace(
        programs,
        target_step=timed(programs.target_step),
        accept=timed(programs.accept),
        draft_extend=programs.draft_extend and timed(programs.draft_extend),
        draft_step=programs.draft_step and timed(programs.draft_step),
    )
