"""A tiny random target with rollouts of its own, for trainer tests."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.model.llama import Llama
from speccompile.train.cache import RolloutCache, write_shard
from speccompile.train.config import TrainConfig
from speccompile.train.rollout import Generator
from speccompile.train.talk import Prompt, RolloutConfig

VOCAB, EOS = 96, 2
PROMPT = [Prompt((5, 6, 7)), Prompt((8, 9, 10, 11)), Prompt((12, 13))]


def tiny_target(*, seed: int = 0, hidden: int = 32, tied: bool = True) -> Llama:
    """Random float32 weights; peaked enough that greedy texts are not constant."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_ids=(EOS,),
    )
    model = Llama(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        for layer in model.layers:
            layer.input_layernorm.weight.add_(1)
            layer.post_attention_layernorm.weight.add_(1)
        model.norm.weight.add_(1)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for p in model.parameters():
        p.requires_grad_(False)
    return model.eval()


def fill_cache(folder: Path, target: Llama, *, batches: int = 2, seed: int = 0, max_answer: int = 20) -> None:
    """Some shards of answers to three prompts at mixed temperatures."""
    config = RolloutConfig(
        batch_size=8,
        max_answer=max_answer,
        max_length=48,
        own_prompts=0.0,
        second_turns=0.0,
        temperatures=(0.0, 1.0, 2.0),
        seed=seed,
    )
    rollouts = Generator(target, None, PROMPT, config).rollouts()
    for i in range(batches):
        write_shard(folder, f"s{seed}-{i:04d}", list(itertools.islice(rollouts, 8)), {})


def tiny_cache(folder: Path, target: Llama, held_out_percent: int = 0) -> RolloutCache:
    fill_cache(folder, target)
    return RolloutCache(folder, held_out_percent)


def tiny_config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "draft_vocab_size": 48,
        "steps": 6,
        "batch_tokens": 128,
        "dtype": "fp32",
        "held_out_percent": 0,
        "lr": 1e-3,
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]
