"""Sessions over a tiny random Llama and random EAGLE heads, run eagerly through the real programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain, named_tree
from tests.runtime.fakes import finish
from tests.runtime.graph import EAGLE1, EAGLE3, LIMITS, VOCAB, tiny

MC = named_tree("mc_sim_7b_63")


def slots(tensors: list[Tensor], block_row: np.ndarray, count: int, keys: bool) -> list[Tensor]:
    """The first ``count`` slots of a request, [slots, heads, head_dim] per layer."""
    table = torch.from_numpy(block_row[: -(-count // LIMITS.block_size)]).long()
    order = (0, 3, 1, 2) if keys else (0, 2, 1, 3)
    return [layer[table].permute(order).flatten(0, 1)[:count] for layer in tensors]


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize("tree", [OFF, chain(3), MC], ids=lambda t: t.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_equal_a_dense_forward(head, tree, temperature) -> None:
    graph = tiny(head, tree, prefill_chunk=6)
    prompts = [[1], [3, 1, 4, 1, 5, 9, 2, 6], [t % VOCAB for t in range(17)]]
    each = [SamplingParams(max_tokens=m, temperature=temperature, seed=m) for m in (20, 7, 14)]
    requests = [graph.session.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    finish(graph.session)
    for request, prompt, p in zip(requests, prompts, each, strict=True):
        assert request.completion().token_ids == graph.plain(prompt, p)
    if tree is MC:
        assert graph.session.stats.counts.acceptance_length > 1.2


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
def test_caches_equal_a_fresh_prefill_after_every_round(head) -> None:
    """T03, K01: after rounds of a wide tree both caches are what one pass over the text would leave."""
    graph = tiny(head, MC)
    p = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    graph.session.submit([2, 7, 1], p)
    request = graph.session.submit([3, 1, 4, 1, 5], p)
    for _ in range(8):
        graph.session.step()
        fresh = tiny(head, chain(1))
        again = fresh.session.submit(request.tokens[: request.committed], SamplingParams(max_tokens=9))
        fresh.session.step()
        # The head is one round behind: its last pairs are read when the next round begins.
        head_len = request.pending[0].start
        fresh.session.step()
        for name, count in (("target", request.committed), ("draft", head_len)):
            for ours, theirs, keys in zip(
                getattr(graph.kv, name), getattr(fresh.kv, name), (True, False), strict=True
            ):
                pairs = zip(
                    slots(ours, request.block_row, count, keys),
                    slots(theirs, again.block_row, count, keys),
                    strict=True,
                )
                for mine, reference in pairs:
                    torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)
    assert request.counts.acceptance_length > 1.2, "nothing was accepted, so nothing was tested"
