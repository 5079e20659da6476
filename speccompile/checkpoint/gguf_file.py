"""A GGUF file of the Llama architecture: its metadata, and its config as a :class:`LlamaConfig`.

Needs the optional package ``gguf``.  Key names are those of the GGUF specification.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.errors import CheckpointError

# What converters assume for every Llama 3.x model; the file holds only the resulting factor per frequency.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_LLAMA3_END_TOKENS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_ROPE_KEYS = tuple(
    f"llama.rope.scaling.{k}" for k in ("type", "factor", "original_context_length", "finetuned")
)
CONTROL_TOKEN = 3


class GgufFile:
    """Metadata by key, and the raw tensors (``gguf.ReaderTensor`` by GGUF name)."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(
                f"{path}: reading GGUF needs the package gguf; pip install 'speccompile[gguf]'"
            ) from error
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or not a GGUF file ({error}); copy it again") from error
        self._fields = reader.fields
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {t.name: t for t in reader.tensors}
        self._refuse_other_models()

    def _refuse_other_models(self) -> None:
        name = self.get("general.architecture")
        if name == "llama4":
            raise CheckpointError(f"{self.path}: Llama 4 is not supported yet; use a Llama 2 or 3.x model")
        if name != "llama":
            raise CheckpointError(f"{self.path}: architecture {name!r} is not supported; only 'llama' is")
        if self.get("llama.expert_count", 0):
            raise CheckpointError(f"{self.path}: mixture-of-experts models are not supported")
        if self.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path}: one part of a split model; merge the parts into one file first"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, lists as lists; decoded once, because vocabularies are long."""
        if key not in self._fields:
            return default
        if key not in self._values:
            self._values[key] = self._fields[key].contents()
        return self._values[key]

    def keys(self, prefix: str) -> list[str]:
        """Metadata keys that start with ``prefix``."""
        return [key for key in self._fields if key.startswith(prefix)]

    def require(self, key: str) -> Any:
        """Same, but an absent key is a :class:`CheckpointError`."""
        if key not in self._fields:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is missing; the file is incomplete")
        return self.get(key)

    def integer(self, key: str) -> int:
        value = self.require(key)
        if isinstance(value, list):
            raise CheckpointError(f"{self.path}: {key} differs between layers, which is not supported")
        return int(value)


def gguf_llama_config(file: GgufFile) -> LlamaConfig:
    """The config; biases and tying follow from the tensors that are present."""
    heads = file.integer("llama.attention.head_count")
    hidden = file.integer("llama.embedding_length")
    head_dim = int(file.get("llama.attention.key_length", hidden // heads))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {key} {file.get(key)} is not the head size {head_dim}")
    tokens = file.require("tokenizer.ggml.tokens")
    kv_heads = file.get("llama.attention.head_count_kv", heads)
    if isinstance(kv_heads, list) or heads % kv_heads:
        raise CheckpointError(f"{file.path}: llama.attention.head_count_kv {kv_heads} is not supported")
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=file.integer("llama.feed_forward_length"),
        num_hidden_layers=file.integer("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=int(kv_heads),
        head_dim=head_dim,
        rms_norm_eps=float(f"{file.require('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope=_rope(file, head_dim),
        max_position_embeddings=file.integer("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_ids(file, tokens),
    )


def _eos_ids(file: GgufFile, tokens: list[str]) -> tuple[int, ...]:
    """Every end id: those with a key, and the Llama 3 family, of which GGUF stores only one."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [i for key in keys if (i := file.get(f"tokenizer.ggml.{key}")) is not None]
    types = file.get("tokenizer.ggml.token_type", [])
    for token in (t for t in _LLAMA3_END_TOKENS if t in tokens):
        index = tokens.index(token)
        if index < len(types) and types[index] == CONTROL_TOKEN:
            ids.append(index)
    return tuple(dict.fromkeys(int(i) for i in ids))


def _rope(file: GgufFile, head_dim: int) -> RopeConfig:
    unread = [k for k in file.keys("llama.rope.scal") if k not in _ROPE_KEYS]
    if unread:
        raise CheckpointError(
            f"{file.path}: rope setting {unread[0]} = {file.get(unread[0])} is not supported"
        )
    theta = float(file.get("llama.rope.freq_base", 10000.0))
    kind = file.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "llama3"):
            raise CheckpointError(f"{file.path}: rope_freqs.weight together with rope scaling {kind!r}")
        return _llama3_rope(file, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = float(file.require("llama.rope.scaling.factor"))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = file.integer("llama.rope.scaling.original_context_length")
        return RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position_embeddings=original)
    raise CheckpointError(
        f"{file.path}: rope scaling {kind!r} is not supported; none, linear, yarn, llama3 are"
    )


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Recovers the llama3 law from its frequency divisors, [head_dim / 2], and checks that it fits."""
    stored = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float64).reshape(-1)
    factor = float(stored.max(initial=0.0))
    fitting = [_llama3_factor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, fitting, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: tensor 'rope_freqs.weight' is not the llama3 rope scaling (low 1, high 4, "
            f"original 8192), the only one read from factors; use the Hugging Face checkpoint"
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position_embeddings=_LLAMA3_ORIGINAL,
    )


def _llama3_factor(frequency: float, factor: float) -> float:
    turns = _LLAMA3_ORIGINAL * frequency / (2 * math.pi)
    if turns < _LLAMA3_LOW:
        return factor
    if turns > _LLAMA3_HIGH:
        return 1.0
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
