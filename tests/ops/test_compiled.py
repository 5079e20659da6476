"""The operators inside torch.export and AOTInductor: dynamic sizes, caches updated in place."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from speccompile.ops import kv_append, kv_compact, tree_attention, walk_tree
from tests.ops.batches import Batch, Geometry, Request, causal, random_tree

pytestmark = pytest.mark.usefixtures("plugin")


class Round(nn.Module):
    """A layer's cache update and attention, then acceptance, on one cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layout: list, tree: list, kv: list):
        kv_append(kv[0], kv[1], k * 1.0, v * 1.0, *layout)
        out = tree_attention(q * 1.0, kv[0], kv[1], mask, *layout, 0.25) + 0.0
        path, path_len = walk_tree(*tree, layout[0], 3)
        kv_compact([kv[0]], [kv[1]], path, path_len, layout[0], layout[1], layout[3])
        return out, path, path_len


def _inputs(requests: list[Request]) -> tuple:
    batch = Batch(Geometry(), requests)
    rows = len(batch.query)
    k, v = torch.randn(2, rows, 2, 16)
    drawn, token = torch.randint(2, (2, rows))
    cu_rows = batch.layout[0]
    parent = torch.arange(rows) - 1
    parent[cu_rows[:-1].long()] = -1
    blocks = torch.zeros(64, 2, 16, 16)
    return batch.query, k, v, batch.mask, list(batch.layout), [drawn, token, parent], [blocks, blocks.clone()]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, plugin) -> Path:
    del plugin
    any_requests = [Request(20, causal(70)), Request(3, random_tree(4))]
    rows, words, width = Dim("rows", min=2), Dim("words", min=1, max=8), Dim("width", min=2, max=4096)
    layout = [{0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO, 1: width}]
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: rows, 1: words}, layout, [{0: rows}] * 3, [{}, {}])
    program = torch.export.export(Round(), _inputs(any_requests), dynamic_shapes=shapes)
    target = tmp_path_factory.mktemp("package") / "round.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(target))
    return target


@pytest.mark.parametrize(
    "requests",
    [
        [Request(9, causal(2))],
        [Request(40, random_tree(8)), Request(0, causal(1)), Request(5, random_tree(6))],
        [Request(0, causal(130))],
    ],
    ids=["one", "three", "prefill"],
)
def test_a_package_equals_eager_and_updates_the_cache_in_place(package: Path, requests: list) -> None:
    compiled = torch._inductor.aoti_load_package(str(package))
    inputs = _inputs(requests)
    eager_inputs = copy.deepcopy(inputs)
    addresses = [cache.data_ptr() for cache in inputs[-1]]
    for ours, eager in zip(compiled(*inputs), Round()(*eager_inputs), strict=True):
        assert torch.equal(ours, eager)
    assert [cache.data_ptr() for cache in inputs[-1]] == addresses
    for ours, eager in zip(inputs[-1], eager_inputs[-1], strict=True):
        assert ours.abs().sum() > 0
        assert torch.equal(ours, eager)


def test_a_package_allocates_nothing_of_the_size_of_the_cache(package: Path) -> None:
    """Each round must touch the new slots only: a copied cache would show as an allocation."""
    compiled = torch._inductor.aoti_load_package(str(package))
    inputs = _inputs([Request(9, causal(2))])
    compiled(*inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(*inputs)
    largest = max(abs(event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 0 < largest < inputs[-1][0].nbytes / 4
