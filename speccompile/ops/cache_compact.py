"""``kv_compact``: move the KV of an accepted path to the slots that follow the prefix.

Legend: R requests, P longest path, M blocks per request.  ``k_caches`` and ``v_caches`` hold one
tensor per layer (layouts of :mod:`speccompile.ops.cache_append`), updated in place; ``path`` i64
[R, P] holds row indices, root first; ``path_len`` i64 [R]; ``cu_rows`` i32 [R+1] into the same rows;
``prefix_len`` i32 [R]; ``block_table`` i32 [R, M].  For j in 1 .. path_len-1, slot
``prefix_len + path[r, j] - cu_rows[r]`` moves to slot ``prefix_len + j``.  A child comes after its
parent, so source offsets ascend and are at least j: moving in path order overwrites nothing needed.
"""

from __future__ import annotations

from torch import Tensor

from speccompile.ops.paging import locate
from speccompile.ops.registry import register

SCHEMA = (
    "kv_compact(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor path, Tensor path_len, "
    "Tensor cu_rows, Tensor prefix_len, Tensor block_table) -> ()"
)


def reference(
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    path_RP: Tensor,
    path_len_R: Tensor,
    cu_rows_R1: Tensor,
    prefix_len_R: Tensor,
    block_table_RM: Tensor,
) -> None:
    for r, path_len in enumerate(path_len_R.tolist()):
        source_L = path_RP[r, :path_len] - cu_rows_R1[r] + prefix_len_R[r]
        target_L = prefix_len_R[r] + source_L.new_ones(path_len).cumsum(0) - 1
        block_size = v_caches[0].shape[2]
        from_block, from_offset = locate(source_L, block_table_RM[r], block_size)
        to_block, to_offset = locate(target_L, block_table_RM[r], block_size)
        for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
            k_cache[to_block, :, :, to_offset] = k_cache[from_block, :, :, from_offset]
            v_cache[to_block, :, to_offset, :] = v_cache[from_block, :, from_offset, :]


def fake(*_: object) -> None:
    """Nothing is returned."""


kv_compact = register(SCHEMA, reference, fake)
