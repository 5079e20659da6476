"""Speculative against plain decoding, token by token, and how close a call each first difference was.

The promise is equality.  In float32 it is exact; in 16 bits a kernel that sums in another order can
flip a near-tie, so every first difference is reported with the gap between the two best scores there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from speccompile.ops.drawing import kept_tokens
from speccompile.ops.noise import gumbel_noise
from speccompile.runtime.batch import CausalLayouts, tensor
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Completion

# Largest gap, in logits, that the rounding of a dtype explains: two steps of a logit between 16 and 32.
TOLERANCE = {"fp32": 1e-3, "fp16": 2 * 2.0**-6, "bf16": 2 * 2.0**-3}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where the two outputs differ (None: one has ended).

    ``gap``: best minus second-best score there, in logits, as one call over the common text gives them.
    """

    index: int
    plain_token: int | None
    speculative_token: int | None
    gap: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt, generated twice with the same parameters and seed."""

    name: str
    temperature: float
    seed: int
    tokens: int
    acceptance_length: float
    difference: Difference | None


def compare(
    engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams
) -> tuple[Comparison, str]:
    """Generate with ``params`` and with speculation off; returns the comparison and the plain text."""
    plain = engine.complete(prompt, replace(params, speculation="off"))
    params = replace(params, seed=plain.seed)
    speculative = engine.complete(prompt, params)
    comparison = Comparison(
        name=name,
        temperature=params.temperature,
        seed=plain.seed,
        tokens=plain.completion_tokens,
        acceptance_length=speculative.acceptance_length,
        difference=_difference(engine, prompt, params, plain, speculative),
    )
    return comparison, plain.text


def _difference(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, plain: Completion, speculative: Completion
) -> Difference | None:
    ours, theirs = plain.token_ids, speculative.token_ids
    if ours == theirs:
        return None
    index = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    best = torch.topk(perturbed_scores(engine, [*prompt, *ours[:index]], params), 2).values
    return Difference(
        index=index,
        plain_token=ours[index] if index < len(ours) else None,
        speculative_token=theirs[index] if index < len(theirs) else None,
        gap=float(best[0] - best[1]) * (params.temperature or 1.0),
    )


def perturbed_scores(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> Tensor:
    """f64 [V]: the scores whose argmax is the token after ``tokens``; -inf where a filter removed the id.

    Runs ``target_step`` over the whole text in the engine's KV cache, so no request may be running.
    """
    logits_1V = _last_logits(engine, tokens).double()
    if params.temperature == 0:
        return logits_1V[0]
    assert params.seed is not None, "sampled scores depend on the seed"
    l_1V = logits_1V / params.temperature
    position = torch.full((1, 1), len(tokens))
    noise_1V = gumbel_noise(torch.full((1, 1), params.seed), position, torch.arange(l_1V.shape[1]))
    filters = (torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p]))
    return (l_1V + noise_1V).where(kept_tokens(l_1V, *filters), float("-inf"))[0]


def _last_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """f32 [1, V] logits after the last token."""
    programs, kv = engine.programs, engine.kv
    limits, device = programs.limits, programs.device
    layouts = CausalLayouts(limits.max_rows)
    blocks = np.arange(1, limits.blocks_per_request + 1, dtype=np.int32)[None]
    for start in range(0, len(tokens), limits.max_rows):
        chunk = np.array(tokens[start : start + limits.max_rows], np.int64)
        layout = layouts.make(np.array([start]), np.array([len(chunk)]), blocks)
        layout = layout.padded(limits.min_target_rows)
        token = np.pad(chunk, (0, len(layout.position) - len(chunk)))
        last = np.full(limits.min_target_rows, len(chunk) - 1)
        logits, _ = programs.target_step(
            tensor(token, device), *layout.tensors(device), tensor(last, device), *kv.target
        )
    return logits[:1]
