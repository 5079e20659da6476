"""Fills the graphs with checkpoint weights, one tensor at a time, in the engine's dtype.

The only place that knows how canonical checkpoint names map onto module parameters (fused q/k/v and
gate/up).  Modules are created on the meta device, so nothing is allocated twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.errors import CheckpointError
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.model.rotary import inverse_frequencies

Fetch = Callable[[str], Tensor]
"""Returns a checkpoint tensor by its canonical name."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def source_names(parameter: str) -> tuple[str, ...]:
    """Checkpoint names whose rows, stacked, make up a module parameter."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in parameter:
            return tuple(parameter.replace(fused, part) for part in parts)
    return (parameter,)


def _fill(module: nn.Module, fetch: Fetch, dtype: torch.dtype) -> None:
    for name, parameter in list(module.named_parameters()):
        value = torch.cat([fetch(source).to(dtype) for source in source_names(name)])
        if value.shape != parameter.shape:
            raise CheckpointError(f"{name}: shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def load_llama(config: LlamaConfig, fetch: Fetch, dtype: torch.dtype) -> Llama:
    """Target graph with weights from ``fetch`` (Hugging Face names)."""
    with torch.device("meta"):
        model = Llama(config)
    model.rotary.inv_freq = inverse_frequencies(config.rope, config.head_dim)[0]

    def named(name: str) -> Tensor:
        if name == "lm_head.weight":
            return fetch("model.embed_tokens.weight" if config.tie_word_embeddings else name)
        return fetch(f"model.{name}")

    _fill(model, named, dtype)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def draft_token_ids(config: HeadConfig, fetch: Fetch) -> Tensor:
    """Target ids of the draft vocabulary, i64 [U]; ``d2t`` holds offsets, absent means identity."""
    ids = torch.arange(config.draft_vocab_size)
    return ids if config.draft_vocab_size == config.vocab_size else ids + fetch("d2t").to(torch.int64)


def load_head(config: HeadConfig, fetch: Fetch, target: Llama, dtype: torch.dtype) -> EagleHead:
    """Head graph; embedding and ``lm_head`` come from ``target`` where the head has none of its own."""
    with torch.device("meta"):
        head = EagleHead(config)
    head.rotary.inv_freq = inverse_frequencies(config.rope, config.head_dim)[0]

    def named(name: str) -> Tensor:
        if name == "embed_tokens.weight" and not config.own_embedding:
            return target.embed_tokens.weight.detach()
        if name == "lm_head.weight" and not config.own_lm_head:
            return target.lm_head.weight.detach()[draft_token_ids(config, fetch)]
        return fetch(name)

    _fill(head, named, dtype)
    if not config.own_embedding and head.embed_tokens.weight.dtype == target.embed_tokens.weight.dtype:
        head.embed_tokens.weight = target.embed_tokens.weight
    return head.eval()
