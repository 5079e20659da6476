"""Where a fresh ``fc`` starts: the best linear predictor of the target's next state.

EAGLE-1 maps (embedding of token i+1, feature i) to feature i+1, which alone finds the target's next token in
a third of the cases; with layer norms and live layers it maps to the stream that the first of them reads at
i+1.  EAGLE-3 maps the aux features of position i to the final residual of position i+1 at unit scale (the
post-norm state without the final norm's gain): regressing onto the gained state instead finds the same
tokens, but leaves the head's layers coordinates that the target's layers do not know.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_RIDGE = 1e-4

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Inputs [n, I] and outputs [n, O] of a regression, one pair per sequence."""


def eagle1_pairs(embed: Tensor, sequences: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Pairs:
    """``sequences`` yields ids i64 [n + 1], post-norm features and the states to reach, both [n, h]."""
    for ids, hidden, state in sequences:
        yield torch.cat((embed[ids[1 : len(hidden)]].float(), hidden[:-1].float()), dim=1), state[1:].float()


def eagle3_pairs(gain: Tensor, sequences: Iterable[tuple[Tensor, Tensor]]) -> Pairs:
    """``sequences`` yields aux features [n, F] and post-norm features [n, h]; ``gain`` [h] is divided out."""
    for aux, hidden in sequences:
        yield aux[:-1].float(), hidden[1:].float() / gain


def ridge_map(pairs: Pairs) -> tuple[Tensor, float]:
    """The ridge-regression map, float32 [O, I], and the rms of its predictions over that of the outputs."""
    gram = cross = square = torch.zeros((), dtype=torch.float64)
    for x, y in pairs:
        gram, cross = gram + (x.T @ x).double(), cross + (x.T @ y).double()
        square = square + y.double().square().sum()
    ridged = gram + torch.diag(gram.diag() * _RIDGE + gram.diag().mean() * _RIDGE * 0.01)
    solution = torch.linalg.solve(ridged, cross)
    predicted = (solution * (gram @ solution)).sum()
    return solution.T.float().contiguous(), float((predicted / square).clamp(min=0).sqrt())
