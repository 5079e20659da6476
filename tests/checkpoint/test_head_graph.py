"""Heads as read fill the head graph: canonical names and flags mean the same to reader and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccompile.checkpoint.heads import Head, open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import Target
from speccompile.model.load import load_head, load_llama
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import VOCAB, H


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return build.target(tmp_path_factory.mktemp("target"))


def first_hidden(head: Head, token: Tensor, feature: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Rows of length-one sequences: attention returns the value of the row itself."""
    llama = load_llama(target.config, target.tensor, torch.float32)
    graph = load_head(head.config, head.tensor, llama, torch.float32)
    groups = head.config.num_attention_heads // head.config.num_key_value_heads

    def attend(_layer: int, _q: Tensor, _k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(groups, dim=1)

    with torch.no_grad():
        hidden = graph.fuse(feature)
        return hidden, graph.lm_head(graph(token, hidden, torch.zeros_like(token), attend)[1])


@pytest.mark.parametrize(
    "writer",
    [
        build.safeailab1,
        build.reduced_eagle1,
        build.old_speculators,
        build.safeailab3,
        build.small_eagle3,
        build.specforge,
        build.speculators,
        build.modelopt,
    ],
)
def test_every_format_runs_in_the_graph(
    tmp_path: Path, target: Target, writer: Callable[[Path], Path]
) -> None:
    head = check_pair(target, open_head(writer(tmp_path), target.config))
    feature = torch.randn(3, head.config.feature_size)
    hidden, logits = first_hidden(head, torch.tensor([0, 5, VOCAB - 1]), feature, target)
    assert hidden.shape == (3, H if head.config.kind == "eagle1" else head.config.hidden_size)
    assert logits.shape == (3, head.config.draft_vocab_size)
    assert logits.isfinite().all()
    if head.config.kind == "eagle3":
        fc = head.tensor("fc.weight").float()
        torch.testing.assert_close(hidden, feature @ fc.T, rtol=1e-4, atol=1e-4)
