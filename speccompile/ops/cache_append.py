"""``kv_append``: write the keys and values of new rows into the paged cache.

Legend: T rows, R requests, H kv heads, D head width, M blocks per request.
``k_cache`` [blocks, H, D, block_size], ``v_cache`` [blocks, H, block_size, D], updated in place;
``k``, ``v`` [T, H, D] of the cache's dtype; ``cu_rows`` i32 [R+1]; ``prefix_len`` and
``suffix_start`` i32 [R]; ``block_table`` i32 [R, M].  Row j of request r goes to slot
``prefix_len[r] + suffix_start[r] + j``; rows past ``cu_rows[R]`` are padding and are not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccompile.ops.paging import locate
from speccompile.ops.registry import register

SCHEMA = (
    "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cu_rows, "
    "Tensor prefix_len, Tensor suffix_start, Tensor block_table) -> ()"
)


def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_rows_R1: Tensor,
    prefix_len_R: Tensor,
    suffix_start_R: Tensor,
    block_table_RM: Tensor,
) -> None:
    cu = cu_rows_R1.tolist()
    first_slot_R = (prefix_len_R + suffix_start_R).tolist()
    for r, first_slot in enumerate(first_slot_R):
        rows = slice(cu[r], cu[r + 1])
        slot_L = torch.arange(first_slot, first_slot + cu[r + 1] - cu[r], device=k_cache.device)
        block_L, offset_L = locate(slot_L, block_table_RM[r], v_cache.shape[2])
        k_cache[block_L, :, :, offset_L] = k_THD[rows]
        v_cache[block_L, :, offset_L, :] = v_THD[rows]


def fake(*_: Tensor) -> None:
    """Nothing is returned."""


kv_append = register(SCHEMA, reference, fake)
