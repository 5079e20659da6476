"""Tiny random heads of every format, written to disk the way the tools that own the formats write them.

Names and shapes are listed here by hand, independently of the readers.  ``edit(config, tensors)`` changes
either before writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.checkpoint.hf_config import read_llama_config
from speccompile.checkpoint.target import Target, expected_shapes, open_target

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Edit = Callable[[Config, Tensors], object]

H, MLP, HEADS, KV, DIM, VOCAB, DRAFT, LAYERS = 64, 96, 4, 2, 16, 512, 128, 8

TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=H,
    intermediate_size=MLP,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=DIM,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def kept_ids(draft: int = DRAFT, vocab: int = VOCAB) -> Tensor:
    """A reduced vocabulary: random distinct ids, ascending."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:draft].sort().values


def vocab_map(draft: int = DRAFT, vocab: int = VOCAB) -> Tensors:
    """``d2t`` offsets and the ``t2d`` mask."""
    ids = kept_ids(draft, vocab)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(draft), "t2d": t2d}


def llama_block() -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
    }


def layer(prefix: str, *, h: int = H, attention_in: int | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer without its input norms."""
    width = attention_in or h
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * DIM, width),
        f"{prefix}.self_attn.k_proj.weight": (KV * DIM, width),
        f"{prefix}.self_attn.v_proj.weight": (KV * DIM, width),
        f"{prefix}.self_attn.o_proj.weight": (h, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": (MLP, h),
        f"{prefix}.mlp.up_proj.weight": (MLP, h),
        f"{prefix}.mlp.down_proj.weight": (h, MLP),
        f"{prefix}.post_attention_layernorm.weight": (h,),
    }


def first_eagle3_layer(prefix: str, *, h: int = H) -> dict[str, tuple[int, ...]]:
    norms = {f"{prefix}.input_layernorm.weight": (h,), f"{prefix}.hidden_norm.weight": (h,)}
    return layer(prefix, h=h, attention_in=2 * h) | norms


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write(folder: Path, config: Config, tensors: Tensors, edit: Edit | None) -> Path:
    if edit is not None:
        edit(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def safeailab1(folder: Path, edit: Edit | None = None) -> Path:
    """EAGLE-1/2 of a Llama-3: no fc bias, no input norm, no final norm, no lm_head."""
    shapes = {"fc.weight": (H, 2 * H), **layer("layers.0")}
    return write(folder, llama_block() | {"rope_theta": 500000.0}, random_tensors(shapes), edit)


def reduced_eagle1(folder: Path, edit: Edit | None = None) -> Path:
    """Our extension: EAGLE-1 with a reduced vocabulary over the target's lm_head."""

    def reduce(config: Config, tensors: Tensors) -> None:
        config["draft_vocab_size"] = DRAFT
        tensors["d2t"] = vocab_map()["d2t"]
        if edit is not None:
            edit(config, tensors)

    return safeailab1(folder, reduce)


def eagle3_shapes(prefix: str, *, h: int = H, target_h: int = H, aux: int = 3) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (h, aux * target_h),
        **first_eagle3_layer(prefix, h=h),
        "norm.weight": (h,),
        "lm_head.weight": (DRAFT, h),
    }


def safeailab3(folder: Path, edit: Edit | None = None) -> Path:
    """EAGLE-3 as the authors publish it: float16, no rope keys, no embedding."""
    tensors = random_tensors(eagle3_shapes("midlayer"), torch.float16) | vocab_map()
    return write(folder, llama_block() | {"draft_vocab_size": DRAFT}, tensors, edit)


def small_eagle3(folder: Path, edit: Edit | None = None) -> Path:
    """The 70B kind: half the target's width and an embedding of its own (probe L05)."""
    shapes = eagle3_shapes("midlayer", h=32, target_h=H) | {"embed_tokens.weight": (VOCAB, 32)}
    config = llama_block() | {
        "draft_vocab_size": DRAFT,
        "hidden_size": 32,
        "head_dim": DIM,
        "target_hidden_size": H,
    }
    return write(folder, config, random_tensors(shapes) | vocab_map(), edit)


def specforge(folder: Path, edit: Edit | None = None, *, export: str = "hf") -> Path:
    """SpecForge; ``hf`` keeps the embedding, ``sglang`` drops it.  Ids count outputs of layers."""
    shapes = eagle3_shapes("midlayer")
    if export == "hf":
        shapes["embed_tokens.weight"] = (VOCAB, H)
    config = llama_block() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]},
        "eos_token_id": [1, 2],
        "rope_theta": 20000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
    }
    return write(folder, config, random_tensors(shapes, torch.bfloat16) | vocab_map(), edit)


def speculators(folder: Path, edit: Edit | None = None) -> Path:
    """speculators EAGLE-3 with every optional norm off."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": llama_block() | {"rope_theta": 30000.0},
        "speculators_config": {"algorithm": "eagle3"},
    }
    return write(folder, config, random_tensors(eagle3_shapes("layers.0")) | vocab_map(), edit)


def old_speculators(folder: Path, edit: Edit | None = None) -> Path:
    """The removed EAGLE-1 variant: ``fusion_fc`` and ``transformer.``."""
    shapes = {"fusion_fc.weight": (H, 2 * H), "fusion_fc.bias": (H,), **layer("transformer")}
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "layernorms": False,
        "fusion_bias": True,
        "transformer_layer_config": llama_block(),
    }
    return write(folder, config, random_tensors(shapes), edit)


def modelopt(folder: Path, edit: Edit | None = None) -> Path:
    """ModelOpt export: numbered layers, d2t without t2d, yarn put in by the exporter."""
    tensors = random_tensors(eagle3_shapes("layers.0"), torch.bfloat16) | {"d2t": vocab_map()["d2t"]}
    config = llama_block() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT,
        "head_dim": DIM,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    }
    return write(folder, config, tensors, edit)


def target(folder: Path, *, vocab: int = VOCAB, h: int = H, layers: int = LAYERS) -> Target:
    """A tiny random Llama target in Hugging Face form, opened."""
    config = llama_block() | {
        "hidden_size": h,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "head_dim": DIM,
    }
    write(folder, config, {}, None)
    shapes = expected_shapes(read_llama_config(folder))
    write(folder, config, random_tensors(shapes), None)
    return open_target(folder)
