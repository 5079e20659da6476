"""Sessions over a tiny random Llama and random EAGLE heads, run eagerly through the real programs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from speccompile.checkpoint.config import HeadConfig, LlamaConfig, RopeConfig
from speccompile.limits import Limits, kv_block_shapes
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.model.programs import Accept, DraftExtend, DraftStep, TargetStep
from speccompile.ops.drawing import draw_tokens
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.programs import KvCache, ProgramSet, allocate_layers
from speccompile.runtime.session import Session
from speccompile.tree.named import OFF, chain, named_tree
from speccompile.tree.tree import Tree
from tests.model.dense import dense_causal_attend
from tests.runtime.fakes import finish

VOCAB = 12
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500.0),
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
EAGLE1 = HeadConfig(
    kind="eagle1",
    num_hidden_layers=1,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500.0),
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    final_norm=False,
)
EAGLE3 = dataclasses.replace(
    EAGLE1, kind="eagle3", aux_layers=(0, 1), final_norm=True, own_lm_head=True, num_hidden_layers=2
)
LIMITS = Limits(
    max_batch_size=4,
    max_seq_len=80,
    max_rows=112,
    max_tree_depth=5,
    draft_topk=4,
    block_size=8,
)
MC = named_tree("mc_sim_7b_63")


def random_weights(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.eval()


class Tiny:
    """A target, a head and a session over them."""

    def __init__(self, head: HeadConfig, tree: Tree, **options) -> None:
        self.head_config = head
        self.target = random_weights(Llama(TARGET), 0)
        ids = torch.arange(VOCAB)
        eagle = random_weights(EagleHead(head), 1)
        modules = {
            "target_step": TargetStep(self.target, head.aux_layers),
            "accept": Accept(LIMITS.max_tree_depth + 1),
            "draft_extend": DraftExtend(eagle, ids, LIMITS.draft_topk),
            "draft_step": DraftStep(eagle, ids, LIMITS.draft_topk),
        }
        programs = {name: torch.no_grad()(module.forward) for name, module in modules.items()}
        self.programs = ProgramSet(limits=LIMITS, **programs)
        self.kv = self.new_kv()
        self.session = Session(
            self.programs,
            self.kv,
            vocab_size=VOCAB,
            eos_ids=(),
            token_bytes=lambda token: bytes([97 + token]),
            default_tree=tree,
            **options,
        )

    def new_kv(self) -> KvCache:
        blocks, size = LIMITS.default_num_blocks, LIMITS.block_size
        target = allocate_layers(
            TARGET.num_hidden_layers, blocks, kv_block_shapes(TARGET, size), torch.float32
        )
        head = self.head_config
        draft = allocate_layers(head.num_hidden_layers, blocks, kv_block_shapes(head, size), torch.float32)
        return KvCache(
            num_blocks=blocks,
            target_keys=target[0],
            target_values=target[1],
            draft_keys=draft[0],
            draft_values=draft[1],
        )

    @torch.no_grad()
    def plain(self, prompt: list[int], p: SamplingParams) -> list[int]:
        """Token after token by a dense forward over the whole text."""
        tokens = list(prompt)
        for _ in range(p.max_tokens):
            length = len(tokens)
            hidden, _ = self.target(torch.tensor(tokens), torch.arange(length), dense_causal_attend, ())
            args = (p.seed, length, p.temperature, p.top_k, p.top_p, p.min_p)
            columns = [torch.tensor([value]) for value in args]
            tokens.append(int(draw_tokens(self.target.lm_head(hidden[-1:]).float(), *columns)))
        return tokens[len(prompt) :]


def slots(tensors: list[Tensor], block_row: np.ndarray, count: int, keys: bool) -> list[Tensor]:
    """The first ``count`` slots of a request, [slots, heads, head_dim] per layer."""
    table = torch.from_numpy(block_row[: -(-count // LIMITS.block_size)]).long()
    order = (0, 3, 1, 2) if keys else (0, 2, 1, 3)
    return [layer[table].permute(order).flatten(0, 1)[:count] for layer in tensors]


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize("tree", [OFF, chain(3), MC], ids=lambda t: t.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_equal_a_dense_forward(head, tree, temperature) -> None:
    tiny = Tiny(head, tree, prefill_chunk=6)
    prompts = [[1], [3, 1, 4, 1, 5, 9, 2, 6], [t % VOCAB for t in range(17)]]
    each = [SamplingParams(max_tokens=m, temperature=temperature, seed=m) for m in (20, 7, 14)]
    requests = [tiny.session.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    finish(tiny.session)
    for request, prompt, p in zip(requests, prompts, each, strict=True):
        assert request.completion().token_ids == tiny.plain(prompt, p)
    if tree is MC:
        assert tiny.session.stats.counts.acceptance_length > 1.2


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
def test_caches_equal_a_fresh_prefill_after_every_round(head) -> None:
    """T03, K01: after rounds of a wide tree both caches are what one pass over the text would leave."""
    tiny = Tiny(head, MC)
    p = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    tiny.session.submit([2, 7, 1], p)
    request = tiny.session.submit([3, 1, 4, 1, 5], p)
    for _ in range(8):
        tiny.session.step()
        fresh = Tiny(head, chain(1))
        again = fresh.session.submit(request.tokens[: request.committed], SamplingParams(max_tokens=9))
        fresh.session.step()
        # The head is one round behind: its last pairs are read when the next round begins.
        head_len = request.pending.start
        fresh.session.step()
        for name, count in (("target", request.committed), ("draft", head_len)):
            for ours, theirs, keys in zip(
                getattr(tiny.kv, name), getattr(fresh.kv, name), (True, False), strict=True
            ):
                pairs = zip(
                    slots(ours, request.block_row, count, keys),
                    slots(theirs, again.block_row, count, keys),
                    strict=True,
                )
                for mine, reference in pairs:
                    torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)
    assert request.counts.acceptance_length > 1.2, "nothing was accepted, so nothing was tested"
