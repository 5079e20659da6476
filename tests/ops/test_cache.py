"""kv_append and kv_compact: reference and kernels write exactly the slots they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speccompile.ops import cache_append, cache_compact, kv_append, kv_compact
from tests.ops.batches import Batch, Geometry, Request, append_all, causal, random_tree

SHAPES = [Geometry(), Geometry(heads=3, query_heads=9, dim=24, block=12, dtype=torch.bfloat16)]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("append", [cache_append.reference, kv_append], ids=["reference", "kernel"])
@pytest.mark.parametrize("shape", SHAPES, ids=["f32", "bf16"])
def test_append_fills_the_new_slots_and_nothing_else(shape: Geometry, append) -> None:
    batch = Batch(
        shape, [Request(13, causal(40)), Request(0, random_tree(5, 3), earlier=3), Request(31, [[0]])]
    )
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    for r, request in enumerate(batch.requests):
        for slot in range(request.committed + request.earlier, batch.keys[r].shape[0]):
            block, offset = batch.block_table[r, slot // shape.block], slot % shape.block
            k_cache[block, :, :, offset] = 77.0
            v_cache[block, :, offset, :] = 77.0
    append_all(batch, k_cache, v_cache, append)
    assert _same(k_cache, batch.k_cache)
    assert _same(v_cache, batch.v_cache)


@pytest.mark.usefixtures("plugin")
def test_append_reads_views_of_a_fused_projection() -> None:
    batch = Batch(Geometry(), [Request(5, causal(3))])
    cut = slice(-3, None)
    fused = torch.cat([batch.query, batch.keys[0][cut], batch.values[0][cut]], dim=1)
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    kv_append(k_cache, v_cache, fused[:, 4:6], fused[:, 6:8], *batch.layout)
    assert _same(k_cache, batch.k_cache)


@pytest.mark.usefixtures("plugin")
def test_append_refuses_a_block_outside_the_cache() -> None:
    batch = Batch(Geometry(), [Request(5, causal(3))])
    batch.block_table[0, 0] = 1000
    with pytest.raises(RuntimeError, match="block id 1000"):
        append_all(batch, batch.k_cache, batch.v_cache, kv_append)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("compact", [cache_compact.reference, kv_compact], ids=["reference", "kernel"])
@pytest.mark.parametrize("shape", SHAPES, ids=["f32", "bf16"])
def test_compact_moves_the_path_behind_the_prefix(shape: Geometry, compact) -> None:
    """Offsets of the paths: one that skips rows across a block border, a chain, a bare root."""
    requests = [Request(13, causal(20)), Request(30, causal(4)), Request(1, causal(2))]
    layers = [Batch(shape, requests), Batch(shape, requests)]
    offsets = [[0, 2, 3, 11, 19], [0, 1, 2, 3], [0]]
    padded = torch.tensor([o + o[-1:] * (5 - len(o)) for o in offsets])
    cu_rows, prefix_len, _, table = layers[0].layout
    path, length = padded + cu_rows[:-1, None], torch.tensor([len(o) for o in offsets])
    k_caches, v_caches = [b.k_cache.clone() for b in layers], [b.v_cache.clone() for b in layers]
    compact(k_caches, v_caches, path, length, cu_rows, prefix_len, table)
    for batch, k_cache, v_cache in zip(layers, k_caches, v_caches, strict=True):
        expected_k, expected_v = batch.k_cache.clone(), batch.v_cache.clone()
        for r, chosen in enumerate(offsets):
            base = batch.requests[r].committed
            for j, offset in enumerate(chosen):
                source, target = base + offset, base + j
                sb, tb = table[r, source // shape.block], table[r, target // shape.block]
                expected_k[tb, :, :, target % shape.block] = batch.k_cache[sb, :, :, source % shape.block]
                expected_v[tb, :, target % shape.block] = batch.v_cache[sb, :, source % shape.block]
        assert _same(k_cache, expected_k)
        assert _same(v_cache, expected_v)
