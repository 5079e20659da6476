"""The head over real graphs: what it offers is what one dense pass over the whole text offers.

Probes B01 (positions past the head's ``max_position_embeddings``), L05 (a head narrower than its target),
K01 (true features, not predicted ones, stay in the head's KV) and K03 (chunks hand features on).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import open_target
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import chain, named_tree
from speccompile.tree.tree import Tree
from tests.checkpoint import head_builders as build
from tests.checkpoint.builders import write_llama
from tests.runtime.graph import EAGLE1, EAGLE3, VOCAB, GraphSession, tiny

MC = named_tree("mc_sim_7b_63")


def check_every_round(graph: GraphSession, prompt: list[int], p: SamplingParams) -> int:
    """Runs a request; asserts ids and every round's root candidates; returns the rounds that drafted."""
    request = graph.session.submit(prompt, p)
    while not request.done:
        seen, text = len(graph.roots), request.tokens[: request.committed + 1]
        graph.session.step()
        if len(graph.roots) > seen:
            assert graph.roots[-1][0].tolist() == graph.fresh_roots(text), f"after {len(text)} tokens"
    assert request.completion().token_ids == graph.plain(prompt, p)
    return len(graph.roots)


def from_files(folder: Path, tree: Tree, limit: int) -> GraphSession:
    """A target of 8 layers and a narrower EAGLE-3 head whose config states ``limit`` positions, as read."""
    sizes = {"hidden_size": build.H, "vocab_size": build.VOCAB, "num_hidden_layers": build.LAYERS}
    write_llama(folder / "target", **sizes)

    def edit(config: build.Config, tensors: build.Tensors) -> None:
        config["max_position_embeddings"] = limit
        for weight in tensors.values():
            if weight.ndim == 2:
                weight *= 0.3

    target = open_target(folder / "target")
    head = check_pair(target, open_head(build.small_eagle3(folder / "head", edit), target.config))
    llama = load_llama(target.config, target.tensor, torch.float32)
    graph = load_head(head.config, head.tensor, llama, torch.float32)
    return GraphSession(llama, graph, draft_token_ids(head.config, head.tensor), tree)


def test_positions_past_the_heads_stated_limit(tmp_path: Path) -> None:
    """B01, L05: prompt of 20 and 40 new tokens with a head whose config says 16 positions."""
    graph = from_files(tmp_path, chain(2), limit=16)
    assert graph.head.fc.weight.shape == (32, 3 * build.H)
    assert graph.head.embed_tokens.weight.shape == (build.VOCAB, 32)
    prompt = [(7 * t) % build.VOCAB for t in range(20)]
    assert check_every_round(graph, prompt, SamplingParams(max_tokens=40, seed=0)) > 20


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_every_round_drafts_from_true_features(head, chunk) -> None:
    """K01, K03: after accepted paths, and after chunks, as if the text had just been read in one piece."""
    graph = tiny(head, MC, prefill_chunk=chunk)
    prompt = [t % VOCAB for t in (3, 1, 4, 1, 5, 9, 2, 6, 5)]
    rounds = check_every_round(graph, prompt, SamplingParams(max_tokens=30, seed=0))
    assert graph.session.stats.counts.acceptance_length > 1.2
    assert rounds >= (len(prompt) // chunk if chunk else 0) + 10


def test_chunks_leave_acceptance_as_it_is() -> None:
    """K03: chunk 1 accepts as much as a prompt read in one piece."""
    counts = []
    for chunk in (None, 1):
        graph = tiny(EAGLE1, MC, prefill_chunk=chunk)
        request = graph.session.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], SamplingParams(max_tokens=20))
        while not request.done:
            graph.session.step()
        counts.append((request.counts.rounds, request.counts.acceptance_by_depth))
    assert counts[0] == counts[1]
