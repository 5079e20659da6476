"""draft_topk: candidates under the target's noise, ties, kernel = reference."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops import draft, draft_topk, draw_tokens, gumbel_noise

pytestmark = pytest.mark.usefixtures("plugin")
BOTH = pytest.mark.parametrize("topk", [draft.reference, draft_topk], ids=["reference", "kernel"])


def _rows(n: int) -> tuple:
    return torch.arange(n) * 1234567, torch.arange(n) + 9, torch.tensor([0.0, 1.0, 0.5, 3.0]).repeat(n)[:n]


@BOTH
def test_equals_a_plain_ranking(topk) -> None:
    logits, ids = torch.randn(8, 300), torch.randperm(1000)[:300]
    seed, position, temperature = _rows(8)
    out = topk(logits, ids, seed, position, temperature, 5)
    for n in range(8):
        scores = {}
        for u, token in enumerate(ids.tolist()):
            noise = float(gumbel_noise(seed[n], position[n], torch.tensor(token)))
            t = float(temperature[n])
            scores[token] = float(logits[n, u]) / t + noise if t else float(logits[n, u])
        assert out[n].tolist() == sorted(scores, key=lambda token: (-scores[token], token))[:5]


@pytest.mark.parametrize(("rows", "width", "k"), [(1, 30_000, 8), (5, 400, 1), (9, 64, 64)])
def test_kernel_equals_the_reference(rows: int, width: int, k: int) -> None:
    for scale in (0.1, 3.0, 10.0):
        args = (torch.randn(rows, width) * scale, torch.randperm(2 * width)[:width], *_rows(rows), k)
        assert torch.equal(draft_topk(*args), draft.reference(*args))


@BOTH
def test_ties_go_to_the_lowest_target_id(topk) -> None:
    ids = torch.arange(8000).flip(0)
    out = topk(torch.zeros(1, 8000), ids, torch.tensor([1]), torch.tensor([2]), torch.tensor([0.0]), 4)
    assert out.tolist() == [[0, 1, 2, 3]]


def test_a_head_that_equals_the_target_offers_the_token_drawn() -> None:
    logits = torch.randn(50, 700)
    seed, position, one = torch.arange(50), torch.arange(50), torch.ones(50)
    drawn = draw_tokens(logits, seed, position, one, 0 * seed, one, 0 * one)
    assert torch.equal(draft_topk(logits, torch.arange(700), seed, position, one, 3)[:, 0], drawn)
