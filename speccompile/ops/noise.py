"""The noise that makes text a function of (target, prompt, sampling parameters, seed).

Token id v at absolute position t of a request with seed s gets the Gumbel variate
``g(s, t, v) = -log(-log(u))`` where u is a fixed integer hash of (s, t, v).  The hash uses 32-bit
mixing only (in int64 tensors, masked), so every device and language computes the same u:

    row = finalise over the words [position low, position high, seed low, seed high], chained, twice
    u   = (hash32(v, row) >> 8) + 0.5, divided by 2**24: exact in float32, strictly inside (0, 1)

``finalise`` is the public-domain 32-bit finaliser of MurmurHash3.  Distinct ids of one (seed,
position) get distinct 32-bit hashes.  ``plugins/cpu/noise.h`` is the same function in C++.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1
_U_BITS = 24


def _finalise(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def _absorb(key: Tensor, word: Tensor) -> Tensor:
    return _finalise((key * _GOLDEN + word) & _WORD)


def _row_key(seed: Tensor, position: Tensor, start: int) -> Tensor:
    key = torch.full_like(position, start)
    for value in (position, seed):
        key = _absorb(_absorb(key, value & _WORD), (value >> 32) & _WORD)
    return key


def uniform_noise(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """u in (0, 1), f64, of the broadcast shape of three i64 tensors; multiples of 2**-25."""
    first = _row_key(seed, position, 0x243F6A88)
    second = _row_key(seed, position, 0x85A308D3)
    mixed = _absorb(first, token_id & _WORD)
    bits = _finalise(mixed ^ second) >> (32 - _U_BITS)
    return (bits.double() + 0.5) * 2.0**-_U_BITS


def gumbel_noise(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Standard Gumbel variates g(seed, position, token_id), f64, of the broadcast shape."""
    return -torch.log(-torch.log(uniform_noise(seed, position, token_id)))
