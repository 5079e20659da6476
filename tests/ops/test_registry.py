"""Every operator has a shape twin that agrees with its kernel, and refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from speccompile.ops import draft_topk, draw_tokens, int8_linear, tree_attention, walk_tree
from speccompile.ops.int8_linear import pack_weight
from tests.ops.batches import Batch, Geometry, Request, causal

pytestmark = pytest.mark.usefixtures("plugin")


def _calls() -> list[tuple]:
    n = torch.arange(3)
    f = torch.ones(3)
    return [
        (draw_tokens, torch.randn(3, 50), n, n, f, n, f, f * 0),
        (draft_topk, torch.randn(3, 50), torch.arange(50), n, n, f, 4),
        (walk_tree, n, n, n - 1, torch.tensor([0, 1, 3]).int(), 5),
        (tree_attention, *Batch(Geometry(dtype=torch.bfloat16), [Request(5, causal(3))]).attention_args()),
        (int8_linear, torch.randn(3, 18).bfloat16(), pack_weight(torch.ones(40, 18).char()), torch.ones(40)),
    ]


@pytest.mark.parametrize("index", range(5), ids=["draw", "draft", "walk", "attention", "int8"])
def test_fake_outputs_have_the_real_shapes(index: int) -> None:
    op, *args = _calls()[index]
    real = op(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_wrong_metadata_dtype_is_refused_by_name() -> None:
    op, *args = _calls()[0]
    with pytest.raises(RuntimeError, match="seed"):
        op(args[0], args[1].int(), *args[2:])
