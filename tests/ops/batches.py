"""Random ragged batches over a paged cache, and dense attention written without any of our code.

Legend: T rows, R requests, Hq/H query and kv heads, D head width, L keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speccompile.ops import cache_append


@dataclass
class Request:
    """``committed`` prefix keys, ``earlier`` suffix keys of earlier calls, and for each row of the call
    the suffix slots it sees (its own included)."""

    committed: int
    rows: list[list[int]]
    earlier: int = 0


@dataclass
class Geometry:
    query_heads: int = 4
    heads: int = 2
    dim: int = 16
    block: int = 16
    dtype: torch.dtype = torch.float32


@dataclass
class Batch:
    """``keys[r]``/``values[r]``: what each request's slots hold, [slots, H, D]; the caches start as NaN."""

    shape: Geometry
    requests: list[Request]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    query: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        for request in self.requests[len(self.keys) :]:
            slots = request.committed + request.earlier + len(request.rows)
            self.keys.append(torch.randn(slots, s.heads, s.dim).to(s.dtype))
            self.values.append(torch.randn(slots, s.heads, s.dim).to(s.dtype))
        self.query = torch.randn(sum(len(r.rows) for r in self.requests), s.query_heads, s.dim).to(s.dtype)
        self.scale = s.dim**-0.5
        self._fill()

    def _fill(self) -> None:
        s, count = self.shape, len(self.requests)
        width = max(-(-k.shape[0] // s.block) for k in self.keys) + 1
        order = torch.randperm(count * width + 2)
        self.guard_blocks = order[-2:]
        self.block_table = order[:-2].reshape(count, width).int()
        self.k_cache = torch.full((len(order), s.heads, s.dim, s.block), float("nan"), dtype=s.dtype)
        self.v_cache = torch.full((len(order), s.heads, s.block, s.dim), float("nan"), dtype=s.dtype)
        for r, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            for slot in range(k.shape[0]):
                block, offset = self.block_table[r, slot // s.block], slot % s.block
                self.k_cache[block, :, :, offset] = k[slot]
                self.v_cache[block, :, offset, :] = v[slot]

    @property
    def layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = torch.tensor([0, *(len(r.rows) for r in self.requests)])
        prefix = [r.committed for r in self.requests]
        earlier = [r.earlier for r in self.requests]
        return rows.cumsum(0).int(), torch.tensor(prefix).int(), torch.tensor(earlier).int(), self.block_table

    @property
    def mask(self) -> Tensor:
        visible = [row for request in self.requests for row in request.rows]
        words = 1 + max(slot for row in visible for slot in row) // 64
        mask = torch.zeros(len(visible), words, dtype=torch.int64)
        for t, row in enumerate(visible):
            for slot in row:
                bit = 1 << (slot % 64)
                mask[t, slot // 64] |= bit if bit < 2**63 else -(2**63)
        return mask

    def attention_args(self) -> tuple:
        return (self.query, self.k_cache, self.v_cache, self.mask, *self.layout, self.scale)

    def dense(self) -> Tensor:
        """Attention by a dense masked softmax in float64, [T, Hq, D]."""
        out, t = [], 0
        for request, keys, values in zip(self.requests, self.keys, self.values, strict=True):
            for row in request.rows:
                seen = torch.zeros(keys.shape[0], dtype=torch.bool)
                seen[: request.committed] = True
                seen[[request.committed + s for s in row]] = True
                out.append(
                    _dense_row(self.query[t].double(), keys.double(), values.double(), seen, self.scale)
                )
                t += 1
        return torch.stack(out)


def _dense_row(q_QD: Tensor, k_LHD: Tensor, v_LHD: Tensor, seen_L: Tensor, scale: float) -> Tensor:
    repeat = q_QD.shape[0] // k_LHD.shape[1]
    k_LQD, v_LQD = (x.repeat_interleave(repeat, dim=1) for x in (k_LHD, v_LHD))
    score_QL = (q_QD[None] * k_LQD).sum(-1).T * scale
    weight_QL = score_QL.masked_fill(~seen_L, float("-inf")).softmax(-1)
    return torch.stack([weight_QL[h] @ v_LQD[:, h] for h in range(q_QD.shape[0])])


def causal(rows: int, earlier: int = 0) -> list[list[int]]:
    return [list(range(earlier + j + 1)) for j in range(rows)]


def random_tree(rows: int, earlier: int = 0) -> list[list[int]]:
    """Ancestor lists of a random tree whose first row hangs below ``earlier`` chained slots."""
    paths: list[list[int]] = []
    for j in range(rows):
        parent = paths[int(torch.randint(j, (1,)))] if j else list(range(earlier))
        paths.append([*parent, earlier + j])
    return paths


def append_all(batch: Batch, k_cache: Tensor, v_cache: Tensor, append=cache_append.reference) -> None:
    """Write the rows of the call (their slots come last) with ``append``."""
    new = [slice(k.shape[0] - len(r.rows), None) for k, r in zip(batch.keys, batch.requests, strict=True)]
    k = torch.cat([x[n] for x, n in zip(batch.keys, new, strict=True)])
    v = torch.cat([x[n] for x, n in zip(batch.values, new, strict=True)])
    append(k_cache, v_cache, k, v, *batch.layout)
