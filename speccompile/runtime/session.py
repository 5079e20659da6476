"""The scheduler: which requests run, and what each does in the next round.

Requests are admitted first come, first served, when a place in the batch and every KV block they can
ever need are free; so nothing overtakes, and nothing that runs can run out.  A round picks a tree for every
decoding request, from its table by the load of the moment, and shares the remaining rows among the prompts,
in order of arrival.
A session belongs to one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from speccompile.errors import ConfigError, RequestError
from speccompile.runtime.detokenize import TokenBytes
from speccompile.runtime.kv_blocks import NULL_BLOCK, BlockPool
from speccompile.runtime.members import Chunk
from speccompile.runtime.output import Output
from speccompile.runtime.params import SamplingParams, fresh_seed
from speccompile.runtime.programs import KvCache, ProgramSet
from speccompile.runtime.request import Request
from speccompile.runtime.round import RoundRunner
from speccompile.runtime.stats import SessionStats
from speccompile.tree.named import OFF, check_tree
from speccompile.tree.table import TreeTable, table_of_one
from speccompile.tree.tree import Tree


class Session:
    """Runs requests over one engine.  Whoever drives it calls :meth:`step` until nothing is left.

    ``default_tree``: what requests with speculation ``auto`` use: one tree, or a table that says which tree
    runs at which load.  ``prefill_chunk``: most prompt
    tokens that one request reads per round (default: as many as a call holds).
    """

    def __init__(
        self,
        programs: ProgramSet,
        kv: KvCache,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        token_bytes: TokenBytes,
        default_tree: Tree | TreeTable = OFF,
        prefill_chunk: int | None = None,
    ) -> None:
        self._limits = programs.limits
        self._has_head = programs.has_head
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._token_bytes = token_bytes
        self._default_trees = _as_table(default_tree)
        self._prefill_chunk = prefill_chunk or programs.limits.max_rows
        self._pool = BlockPool(num_blocks=kv.num_blocks, block_size=programs.limits.block_size)
        self.stats = SessionStats()
        self._runner = RoundRunner(programs, kv, self.stats)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._check_trees(self._default_trees)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._waiting and not self._active

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request; it is done when ``request.done``, and then has its ``completion()``.

        Raises RequestError when the prompt is empty, holds an id outside the vocabulary or leaves no
        room for a token (``len(prompt) >= max_seq_len``), when the tree is too large for the engine,
        or when the KV pool could never hold the request.
        """
        request = self._request(prompt, params)
        if not request.done:
            needed = self._pool.blocks_for(request.slots_needed)
            if needed > self._pool.capacity:
                raise RequestError(
                    f"max_tokens: prompt and {request.max_new} new tokens need {needed} KV blocks, the pool "
                    f"has {self._pool.capacity}; ask for fewer tokens or load the engine with more blocks"
                )
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request that is not done, with finish_reason ``cancelled``; its blocks are free at once."""
        if request.done:
            return
        request.output.finish("cancelled")
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._release(request)

    def step(self) -> None:
        """Admit what fits and run one round for all active requests; does nothing when idle."""
        began = time.perf_counter()
        self._admit()
        if not self._active:
            return
        decoding = [request for request in self._active if not request.prompt_left]
        context = sum(request.committed for request in self._active) / len(self._active)
        trees = {request: request.trees.pick(len(self._active), context) for request in self._active}
        self._runner.run(decoding, [trees[request] for request in decoding], self._chunks(trees))
        for request in [request for request in self._active if request.done]:
            self._release(request)
        self.stats.steps += 1
        self.stats.step_s += time.perf_counter() - began

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        limit = self._limits.max_seq_len
        if not prompt:
            raise RequestError("prompt is empty; give at least one token")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError(f"prompt: {token!r} is not a token id below {self._vocab_size}")
        if len(prompt) >= limit:
            raise RequestError(
                f"prompt has {len(prompt)} tokens, no room is left for an answer within max_seq_len {limit}"
            )
        trees = _as_table(params.tree(self._default_trees))
        try:
            self._check_trees(trees)
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from error
        max_new = min(params.max_tokens, limit - len(prompt))
        output = Output(
            stop_ids={*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)},
            stops=params.stop_strings,
            max_tokens=max_new,
            token_bytes=self._token_bytes,
        )
        return Request(
            prompt=list(prompt),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            trees=trees,
            max_new=max_new,
            max_seq_len=limit,
            output=output,
        )

    def _check_trees(self, trees: TreeTable) -> None:
        for tree in trees.trees:
            if tree.num_nodes and not self._has_head:
                raise ConfigError(f"tree {tree.name!r} needs a draft head and this engine has none; use off")
            check_tree(
                tree,
                draft_topk=self._limits.draft_topk,
                max_depth=self._limits.max_tree_depth,
                max_rows=self._limits.rows_per_request,
            )

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._limits.max_batch_size:
            request = self._waiting[0]
            needed = self._pool.blocks_for(request.slots_needed)
            if needed > self._pool.num_free:
                return
            self._waiting.popleft()
            request.blocks = self._pool.take(needed)
            request.block_row = np.full(self._limits.blocks_per_request, NULL_BLOCK, np.int32)
            request.block_row[:needed] = request.blocks
            self._active.append(request)

    def _chunks(self, trees: Mapping[Request, Tree]) -> list[Chunk]:
        """Rows that the trees leave free go to the prompts; every prompt gets at least one."""
        reading = [request for request in self._active if request.prompt_left]
        free = self._limits.max_rows - sum(trees[r].rows for r in self._active if not r.prompt_left)
        chunks = []
        for later, request in zip(range(len(reading) - 1, -1, -1), reading, strict=True):
            length = min(request.prompt_left, self._prefill_chunk, free - later)
            ends = length == request.prompt_left
            chunks.append(Chunk(request, length, ends, head_reads=trees[request].num_nodes > 0))
            free -= length
        return chunks

    def _release(self, request: Request) -> None:
        self._active.remove(request)
        self._pool.give_back(request.blocks)
        if not self._active:
            self._pool.check_idle()


def _as_table(trees: Tree | TreeTable) -> TreeTable:
    return trees if isinstance(trees, TreeTable) else table_of_one(trees)
