"""A session over real graphs, run eagerly through the four programs, and dense forwards beside it."""

from __future__ import annotations

import dataclasses

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
from speccompile.tree.tree import Tree
from tests.model.dense import dense_causal_attend

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


class GraphSession:
    """``target``, ``head`` and a session over them.  ``roots`` lists what every ``draft_extend`` offered:
    candidates of the roots, i64 [requests, draft_topk]."""

    def __init__(
        self, target: Llama, head: EagleHead, token_ids: Tensor, tree: Tree, *, limits=LIMITS, **options
    ) -> None:
        self.target, self.head, self.token_ids, self.limits = target, head, token_ids, limits
        self.roots: list[Tensor] = []
        self.programs = self._programs()
        self.kv = self._kv()
        self.session = Session(
            self.programs,
            self.kv,
            vocab_size=target.config.vocab_size,
            eos_ids=(),
            token_bytes=lambda token: bytes([97 + token % 26]),
            default_tree=tree,
            **options,
        )

    def _programs(self) -> ProgramSet:
        topk = self.limits.draft_topk
        modules = {
            "target_step": TargetStep(self.target, self.head.config.aux_layers),
            "accept": Accept(self.limits.max_path),
            "draft_extend": DraftExtend(self.head, self.token_ids, topk),
            "draft_step": DraftStep(self.head, self.token_ids, topk),
        }
        programs = {name: torch.no_grad()(module.forward) for name, module in modules.items()}

        def draft_extend(*inputs):
            hidden, candidates = programs["draft_extend"](*inputs)
            self.roots.append(candidates)
            return hidden, candidates

        return ProgramSet(limits=self.limits, **{**programs, "draft_extend": draft_extend})

    def _kv(self) -> KvCache:
        caches = {}
        for name, config in (("target", self.target.config), ("draft", self.head.config)):
            caches[f"{name}_keys"], caches[f"{name}_values"] = allocate_layers(
                config.num_hidden_layers,
                self.limits.default_num_blocks,
                kv_block_shapes(config, self.limits.block_size),
                torch.float32,
            )
        return KvCache(num_blocks=self.limits.default_num_blocks, **caches)

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

    @torch.no_grad()
    def fresh_roots(self, tokens: list[int]) -> list[int]:
        """Greedy candidates after ``tokens`` by one dense pass of target and head over the whole text."""
        ids = torch.tensor(tokens)
        position = torch.arange(len(ids) - 1)
        _, feature = self.target(ids[:-1], position, dense_causal_attend, self.head.config.aux_layers)
        _, scored = self.head(ids[1:], self.head.fuse(feature), position, dense_causal_attend)
        best = self.head.lm_head(scored[-1]).topk(self.limits.draft_topk).indices
        return self.token_ids[best].tolist()


def random_weights(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.eval()


def tiny(head: HeadConfig, tree: Tree, **options) -> GraphSession:
    """A session over a random target and a random head."""
    target = random_weights(Llama(TARGET), 0)
    return GraphSession(target, random_weights(EagleHead(head), 1), torch.arange(VOCAB), tree, **options)
