"""draw_tokens: its law, its filters against a plain numpy account of Hugging Face's, kernel = reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from speccompile.ops import draw_tokens, drawing
from speccompile.ops.drawing import kept_tokens

# 0.999 quantile of chi-square with 7 degrees of freedom.
CHI2_7 = 24.32
BOTH = pytest.mark.parametrize("draw", [drawing.reference, draw_tokens], ids=["reference", "kernel"])
pytestmark = pytest.mark.usefixtures("plugin")


def _args(logits: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None) -> tuple:
    n = logits.shape[0]
    full = [
        torch.as_tensor(x).expand(n).contiguous()
        for x in (seed, torch.arange(n) if position is None else position)
    ]
    f32 = [
        torch.as_tensor(x, dtype=torch.float32).expand(n).contiguous() for x in (temperature, top_p, min_p)
    ]
    return logits, *full, f32[0], torch.as_tensor(top_k).expand(n).contiguous(), f32[1], f32[2]


def _chi2(ids: Tensor, law: Tensor) -> float:
    expected = law.double() * len(ids)
    return float(((torch.bincount(ids, minlength=len(law)) - expected) ** 2 / expected).sum())


@BOTH
def test_draws_follow_the_softmax(draw) -> None:
    table = torch.tensor([1.3, 0.2, -1.0, 0.7, 0.0, 2.0, -0.4, 0.5])
    for temperature in (1.0, 0.6):
        ids = draw(*_args(table.expand(200_000, 8).contiguous(), temperature, seed=11))
        assert _chi2(ids, (table / temperature).softmax(0)) < CHI2_7


@BOTH
def test_second_token_follows_its_own_law_whatever_the_first(draw) -> None:
    """Same seed, next position: given each first token, the second is drawn from that token's row."""
    tables = torch.randn(8, 8)
    seeds = torch.arange(200_000)
    first = draw(*_args(tables[0].expand(200_000, 8).contiguous(), seed=seeds, position=5))
    second = draw(*_args(tables[first], seed=seeds, position=6))
    for token in first.unique():
        assert _chi2(second[first == token], tables[token].softmax(0)) < CHI2_7


def _hf_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Temperature, top-k, top-p, min-p as warpers applied one after the other (no ties in the input)."""
    scores = logits.astype(np.float64) / temperature
    if top_k:
        scores[scores < np.sort(scores)[-min(top_k, len(scores))]] = -np.inf
    if top_p < 1:
        order = np.argsort(scores)
        mass = np.cumsum(np.exp(scores[order] - scores.max()) / np.exp(scores - scores.max()).sum())
        drop = mass <= 1 - top_p
        drop[-1] = False
        scores[order[drop]] = -np.inf
    if min_p:
        probs = np.exp(scores - scores.max())
        scores[probs < min_p] = -np.inf
    return np.isfinite(scores)


FILTERS = [
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.5, 0, 1.0, 0.1),
    (1.0, 40, 0.9, 0.02),
    (0.8, 1, 0.5, 0.5),
    (2.0, 900, 0.3, 0.0),
    (1.0, 0, 0.001, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_what_hugging_face_keeps(filters: tuple) -> None:
    logits = torch.randn(20, 600) * 3
    temperature, top_k, top_p, min_p = filters
    kept = kept_tokens(
        logits.double() / temperature,
        torch.full((20,), top_k),
        torch.full((20,), top_p, dtype=torch.float64),
        torch.full((20,), min_p, dtype=torch.float64),
    )
    assert np.array_equal(kept.numpy(), np.stack([_hf_kept(row, *filters) for row in logits.numpy()]))


def test_filtered_draws_follow_the_renormalised_law() -> None:
    table = torch.tensor([3.0, 0.2, 2.0, 0.7, 1.0, 2.5, 1.5, 2.2])
    kept = torch.from_numpy(_hf_kept(table.numpy(), 1.0, 6, 0.9, 0.0))
    ids = draw_tokens(*_args(table.expand(200_000, 8).contiguous(), top_k=6, top_p=0.9))
    law = table.masked_fill(~kept, float("-inf")).softmax(0)
    assert not torch.isin(ids, torch.nonzero(~kept)).any()
    assert _chi2(torch.searchsorted(torch.nonzero(kept)[:, 0], ids), law[kept]) < CHI2_7


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 20_003), (3, 777), (20, 1500), (2, 1)])
def test_kernel_draws_the_reference_tokens(rows: int, vocabulary: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for filters in [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (30.0, 0, 1.0, 0.0),
            (1e-3, 0, 1.0, 0.0),
            *FILTERS,
        ]:
            for scale in (1.0, 8.0):
                args = _args(
                    torch.randn(rows, vocabulary) * scale, *filters, seed=torch.randint(2**62, (rows,))
                )
                assert torch.equal(draw_tokens(*args), drawing.reference(*args)), filters
    finally:
        torch.set_num_threads(before)


def test_mixed_rows_equal_the_reference() -> None:
    rows = len(FILTERS) * 4
    args = _args(torch.randn(rows, 3000) * 4, *(torch.tensor(x) for x in zip(*(FILTERS * 4), strict=True)))
    args[3][::3] = 0.0
    assert torch.equal(draw_tokens(*args), drawing.reference(*args))


@BOTH
def test_greedy_ties_go_to_the_lowest_id(draw) -> None:
    logits = torch.zeros(3, 9000)
    logits[1, [70, 8999]] = 2.0
    logits[2] = float("-inf")
    assert draw(*_args(logits, 0.0)).tolist() == [0, 70, 0]


@BOTH
def test_top_k_ties_keep_the_lowest_ids(draw) -> None:
    logits = torch.zeros(2000, 300)
    logits[:, 250] = 1.0
    assert set(draw(*_args(logits, top_k=3)).tolist()) == {0, 1, 250}


@BOTH
def test_top_p_on_a_flat_row_keeps_the_first_half(draw) -> None:
    ids = draw(*_args(torch.zeros(2000, 8), top_p=0.5))
    assert set(ids.tolist()) == {0, 1, 2, 3}


@BOTH
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
def test_the_only_legal_token_is_drawn(draw, filters: dict) -> None:
    """All mass on one id, the rest -inf: never NaN, never another id, at any temperature."""
    for temperature in (0.0, 1e-30, 1.0, 1e30):
        logits = torch.full((4, 5000), float("-inf"))
        logits[range(4), [0, 17, 4096, 4999]] = torch.tensor([0.0, -3e38, 3e38, 5.0])
        assert draw(*_args(logits, temperature, **filters)).tolist() == [0, 17, 4096, 4999]


def test_each_row_has_its_own_noise_whatever_the_batch() -> None:
    logits = torch.randn(6, 500)
    seeds, positions = torch.tensor([7, 7, 8, 7, 9, 7]), torch.tensor([1, 2, 1, 1, 5, 9])
    together = draw_tokens(*_args(logits, seed=seeds, position=positions))
    for n in range(6):
        alone = draw_tokens(*_args(logits[n : n + 1], seed=seeds[n], position=positions[n]))
        assert alone[0] == together[n]
