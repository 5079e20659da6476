"""tree_attention: the reference against dense attention, the kernels against both, and row invariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speccompile.ops import attention, tree_attention
from tests.ops.batches import Batch, Geometry, Request, causal, random_tree

SHAPES = [
    Geometry(),
    Geometry(query_heads=9, heads=3, dim=64, block=32),
    Geometry(query_heads=8, heads=1, dim=128, block=64),
    Geometry(query_heads=2, heads=2, dim=24, block=12),
    Geometry(query_heads=14, heads=2, dim=80, block=16),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _requests() -> list[Request]:
    return [
        Request(committed=150, rows=random_tree(9)),
        Request(committed=0, rows=causal(1)),
        Request(committed=7, earlier=5, rows=random_tree(13, earlier=5)),
        Request(committed=33, rows=causal(11)),
        Request(committed=2, rows=[[70 + j] for j in range(3)], earlier=70),
    ]


def test_reference_equals_dense_attention() -> None:
    batch = Batch(Geometry(), _requests())
    torch.testing.assert_close(
        attention.reference(*batch.attention_args()).double(), batch.dense(), atol=2e-6, rtol=0
    )


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"D{s.dim}-B{s.block}-G{s.query_heads // s.heads}")
def test_kernel_equals_dense_attention(shape: Geometry, dtype: torch.dtype) -> None:
    batch = Batch(Geometry(**{**vars(shape), "dtype": dtype}), _requests())
    out = tree_attention(*batch.attention_args())
    torch.testing.assert_close(out.double(), batch.dense(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("committed", [0, 5, 64])
def test_prefill_chunk(committed: int) -> None:
    batch = Batch(Geometry(), [Request(committed=committed, rows=causal(200))])
    torch.testing.assert_close(
        tree_attention(*batch.attention_args()).double(), batch.dense(), atol=2e-6, rtol=0
    )


@pytest.mark.usefixtures("plugin")
def test_padding_rows_are_zero_and_strided_queries_are_read() -> None:
    batch = Batch(Geometry(), [Request(committed=20, rows=causal(3))])
    query, *rest = batch.attention_args()
    fused = torch.full((5, 3 * query.shape[1], query.shape[2]), float("nan"))
    fused[:3, : query.shape[1]] = query
    rest[2] = torch.cat([rest[2], torch.ones(2, 1, dtype=torch.int64)])
    out = tree_attention(fused[:, : query.shape[1]], *rest)
    assert torch.equal(out[:3], tree_attention(query, *batch.attention_args()[1:]))
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))


def _plain_row(batch: Batch, request: int, row: int) -> Tensor:
    """The same row decoded alone, its ancestors committed to the prefix."""
    source = batch.requests[request]
    first = sum(len(r.rows) for r in batch.requests[:request])
    slots = [*range(source.committed), *(source.committed + s for s in source.rows[row])]
    plain = Batch(
        batch.shape,
        [Request(committed=len(slots) - 1, rows=[[0]])],
        keys=[batch.keys[request][slots]],
        values=[batch.values[request][slots]],
    )
    plain.query = batch.query[first + row][None]
    return tree_attention(*plain.attention_args())[0]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"D{s.dim}-B{s.block}-G{s.query_heads // s.heads}")
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_the_same_bits_as_plain_decoding(shape: Geometry, dtype: torch.dtype, threads: int) -> None:
    batch = Batch(Geometry(**{**vars(shape), "dtype": dtype}), [*_requests(), Request(300, random_tree(30))])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = tree_attention(*batch.attention_args())
    finally:
        torch.set_num_threads(before)
    alone = [_plain_row(batch, r, j) for r, q in enumerate(batch.requests) for j in range(len(q.rows))]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_long_context_is_the_same_bits_on_any_number_of_threads(rows: int) -> None:
    shape = Geometry(query_heads=9, heads=3, dim=64, block=32, dtype=torch.bfloat16)
    batch = Batch(shape, [Request(700, random_tree(rows))])
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            outs.append(tree_attention(*batch.attention_args()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.usefixtures("plugin")
def test_huge_scores_do_not_overflow() -> None:
    batch = Batch(Geometry(), [Request(committed=40, rows=random_tree(5))])
    batch.query *= 1e4
    torch.testing.assert_close(
        tree_attention(*batch.attention_args()).double(), batch.dense(), atol=1e-5, rtol=0
    )


@pytest.mark.usefixtures("plugin")
def test_a_table_too_short_for_its_rows_is_refused() -> None:
    batch = Batch(Geometry(), [Request(committed=40, rows=causal(3))])
    *head, table, scale = batch.attention_args()
    with pytest.raises(RuntimeError, match="KV slots"):
        tree_attention(*head, table[:, :2].contiguous(), scale)
