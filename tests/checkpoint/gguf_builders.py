"""Tiny GGUF files written with ``gguf.GGUFWriter`` from transformers models, as converters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.checkpoint.builders import CHAT_TEMPLATE, SPECIAL, train_bpe

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GLOBALS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def gguf_name(name: str) -> str:
    if name in GLOBALS:
        return GLOBALS[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of q and k in GGUF: (half, pair) of each head becomes (pair, half)."""
    width = rows.shape[0] // heads
    order = [
        h * width + half * (width // 2) + pair
        for h in range(heads)
        for pair in range(width // 2)
        for half in (0, 1)
    ]
    return rows[order]


def plain(kind: str) -> Encode:
    """Encodes matrices in one type; vectors stay F32, as the converters do."""

    def encode(_name: str, value: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        quant = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        return gguf.quantize(value, quant), quant

    return encode


def gguf_state(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """float32 arrays by GGUF name, q and k permuted, no head when tied."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.float().numpy()
        part = name.split(".")[-2]
        state[gguf_name(name)] = permute(array, heads[part]) if part in heads else array
    return state


def bpe_keys(core: Tokenizer | None = None, pre: str = "gpt-2") -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE."""
    data = json.loads((core or train_bpe()).to_str())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in data["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def llama_keys(model: LlamaForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    encode: Encode | None = None,
    *,
    architecture: str = "llama",
    extra_tensors: dict[str, np.ndarray] | None = None,
    **keys: Any,
) -> None:
    """Writes ``model``; ``keys`` override metadata (``__`` for a dot), None removes a key."""
    encode = encode or plain("F32")
    overrides = {k.replace("__", "."): v for k, v in keys.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**llama_keys(model), **bpe_keys(), **overrides}.items():
        _add(writer, key, value)
    for name, value in {**gguf_state(model), **(extra_tensors or {})}.items():
        data, quant = encode(name, value)
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adders[type(value)](key, value)
