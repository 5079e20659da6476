"""Probes S01 and S03: what sessions with speculation emit follows the target's own law, token by token.

A target of 8 tokens with a fixed table over the whole text, the engine's own noise, many seeds, and
chi-square against the exact probabilities of the table.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from speccompile.ops.noise import gumbel_noise
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import chain
from speccompile.tree.tree import tree_from_paths
from tests.runtime import fakes
from tests.runtime.fakes import finish, logits_of, make_session, state_of

V = 8
SEEDS, POSITIONS = 1000, 12
PLACES = 60  # requests that run together
TREE = tree_from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])


@pytest.fixture(autouse=True)
def eight_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = torch.meshgrid(*map(torch.arange, (SEEDS, POSITIONS, V)), indexing="ij")
    noise = gumbel_noise(*grid).numpy()
    monkeypatch.setattr(fakes, "VOCAB", V)
    monkeypatch.setattr(fakes, "_TABLE", np.random.default_rng(1).normal(0.0, 1.5, (997, V)))
    monkeypatch.setattr(fakes, "gumbel", lambda seed, position: noise[seed, position])


def law(tokens: list[int], temperature: float) -> np.ndarray:
    weight = np.exp(logits_of(state_of(tokens)) / temperature)
    return weight / weight.sum()


def joint(prompt: list[int], temperature: float) -> np.ndarray:
    """Exact probabilities of the first three tokens, [V, V, V]."""
    out = np.zeros((V, V, V))
    for a, p_a in enumerate(law(prompt, temperature)):
        for b, p_b in enumerate(law([*prompt, a], temperature)):
            out[a, b] = p_a * p_b * law([*prompt, a, b], temperature)
    return out


def p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Chi-square; cells that expect fewer than 5 are taken together."""
    expected = probability.ravel() * counts.sum()
    rare = expected < 5
    seen = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1))


def check_law(texts: list[list[int]], prompt: list[int], temperature: float) -> None:
    """First token, and each pair of neighbours: all follow from the joint law."""
    counts = np.zeros((V, V, V))
    for text, count in Counter(map(tuple, texts)).items():
        counts[text] += count
    exact = joint(prompt, temperature)
    for axes in ((1, 2), (2,), (0,)):
        assert p_value(counts.sum(axes), exact.sum(axes)) > 0.001


def sample(head: fakes.Ranker, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    session, fake = make_session(
        head, max_batch_size=PLACES, max_rows=TREE.rows * PLACES, max_seq_len=POSITIONS, tree=TREE
    )
    submitted = [session.submit(prompt, p) for prompt, p in requests]
    finish(session)
    fake.check_guard()
    assert session.stats.counts.rounds < 2 * len(requests), "nothing was accepted, so nothing was tested"
    return [request.completion().token_ids for request in submitted]


def mixed(scores: np.ndarray, state: int, position: int) -> np.ndarray:
    """Right two times out of three, worst first else."""
    return (fakes.oracle if state % 3 else fakes.anti)(scores, state, position)


@pytest.mark.parametrize("head", [fakes.oracle, fakes.second, mixed], ids=lambda h: h.__name__)
def test_tokens_follow_the_targets_law(head: fakes.Ranker) -> None:
    """S01: the first token comes from the prompt's call, the second and third from rounds with drafts."""
    prompt = [1, 2, 3]
    texts = sample(
        head, [(prompt, SamplingParams(max_tokens=3, temperature=1.0, seed=s)) for s in range(SEEDS)]
    )
    check_law(texts, prompt, 1.0)


def test_each_request_of_a_batch_follows_its_own_table() -> None:
    """S03: three prompts (so three tables), trees and temperatures, side by side in every round."""
    kinds = [
        ([1], 1.0, chain(2)),
        ([5, 0, 6, 6], 0.7, TREE),
        ([7, 2], 1.5, tree_from_paths([[1], [3], [3, 0], [1, 2]])),
    ]
    requests = [
        (prompt, SamplingParams(max_tokens=3, temperature=temperature, seed=seed, speculation=tree))
        for seed in range(SEEDS)
        for prompt, temperature, tree in kinds
    ]
    texts = sample(mixed, requests)
    for index, (prompt, temperature, _) in enumerate(kinds):
        check_law(texts[index::3], prompt, temperature)
