"""The noise: fixed bits, uniform, uncorrelated between neighbouring ids, positions and seeds."""

from __future__ import annotations

import numpy as np
import torch

from speccompile.ops import gumbel_noise
from speccompile.ops.noise import uniform_noise

# 0.999 quantile of chi-square with 255 degrees of freedom.
CHI2_255 = 330.5


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _absorb(key: np.ndarray, word: np.ndarray) -> np.ndarray:
    return _finalise(key * np.uint32(0x9E3779B1) + word.astype(np.uint32))


def _numpy_uniform(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """The definition of ops/noise.py in unsigned 32-bit numpy."""
    keys = []
    for start in (0x243F6A88, 0x85A308D3):
        key = np.array([start], np.uint32)
        for value in (position, seed):
            for word in (value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF):
                key = _absorb(key, np.array([word], np.uint32))
        keys.append(key)
    bits = _finalise(_absorb(keys[0], ids) ^ keys[1]) >> np.uint32(8)
    return (bits.astype(np.float64) + 0.5) / 2**24


def test_matches_an_unsigned_implementation() -> None:
    ids = torch.arange(5000)
    for seed, position in ((0, 0), (7, 131071), (-1, 3), (2**63 - 1, 2**40 + 5), (-(2**63), 0)):
        ours = uniform_noise(torch.tensor(seed), torch.tensor(position), ids)
        assert np.array_equal(ours.numpy(), _numpy_uniform(seed, position, ids.numpy()))


def test_stays_strictly_inside_the_unit_interval() -> None:
    u = uniform_noise(torch.arange(1000)[:, None], torch.tensor(3), torch.arange(4000))
    assert 0 < u.min() <= 2e-6
    assert 1 - 2e-6 <= u.max() < 1
    assert torch.isfinite(gumbel_noise(torch.arange(1000), torch.tensor(0), torch.tensor(9))).all()


def _chi2(u: torch.Tensor) -> float:
    counts = torch.histc(u.double(), bins=256, min=0, max=1)
    expected = u.numel() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_is_uniform_along_each_argument() -> None:
    n, zero = torch.arange(200_000), torch.tensor(0)
    assert _chi2(uniform_noise(zero, zero, n)) < CHI2_255
    assert _chi2(uniform_noise(zero, n, zero)) < CHI2_255
    assert _chi2(uniform_noise(n, zero, zero)) < CHI2_255
    assert _chi2(uniform_noise(n << 32, zero, zero)) < CHI2_255


def test_neighbours_are_uncorrelated() -> None:
    n, zero = torch.arange(200_000), torch.tensor(0)
    limit = 4 / len(n) ** 0.5
    base = uniform_noise(n, n, n)
    for other in (
        uniform_noise(n + 1, n, n),
        uniform_noise(n, n + 1, n),
        uniform_noise(n, n, n + 1),
        uniform_noise(n + 1, n - 1, n),
        uniform_noise(n, zero, zero),
    ):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < limit
