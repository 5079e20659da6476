"""The target model of a build: config, weights under Hugging Face names, tokenizer.

:func:`open_target` accepts a Hugging Face folder or a ``.gguf`` file.  It compares every tensor's name, shape
and dtype with the config before any weight is read; :meth:`Target.check_values` reads each weight once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from speccompile.checkpoint.config import LlamaConfig
from speccompile.checkpoint.hf_config import read_llama_config
from speccompile.checkpoint.tensors import TensorSource, open_tensors
from speccompile.checkpoint.tokenizer_files import (
    TOKENIZER_FILE_NAMES,
    TokenizerFiles,
    read_tokenizer_files,
)
from speccompile.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Target:
    """A validated target.  ``other_files`` are the non-weight files that it was read from."""

    path: Path
    config: LlamaConfig
    source: TensorSource
    other_files: tuple[Path, ...]
    load_tokenizer_files: Callable[[], TokenizerFiles]

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Read on first use; :class:`CheckpointError` when the checkpoint carries none."""
        return self.load_tokenizer_files()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One weight by its Hugging Face name, in the dtype of the file or converted to ``dtype``.

        ``lm_head.weight`` does not exist when ``config.tie_word_embeddings``.
        """
        if name not in self.expected_shapes:
            raise CheckpointError(f"{self.path}: a target with this config has no tensor {name!r}")
        tensor = self.source.get(name)
        return tensor if dtype is None else tensor.to(dtype)

    @cached_property
    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight."""
        return expected_shapes(self.config)

    def digest_files(self) -> list[Path]:
        """Every file that the engine depends on."""
        return [*self.other_files, *self.source.files()]

    def check_values(self, dtype: torch.dtype | None = None) -> None:
        """Reads every weight once and raises :class:`CheckpointError` for the first with NaN or infinity,
        or with a value that ``dtype`` cannot hold.
        """
        for name in self.expected_shapes:
            check_finite(self.source, name, dtype)


def open_target(path: Path) -> Target:
    """Opens and validates a target; :class:`CheckpointError` names the file, the tensor and the remedy."""
    if path.suffix == ".gguf" and path.is_file():
        # Imported here so that the optional package gguf is needed only for GGUF files.
        from speccompile.checkpoint.gguf_source import GgufTensors
        from speccompile.checkpoint.gguf_tokenizer import gguf_tokenizer_files

        gguf = GgufTensors(path)
        config = gguf.config
        check_tensors(config, gguf)
        return Target(
            path=path,
            config=config,
            source=gguf,
            other_files=(),
            load_tokenizer_files=lambda: gguf_tokenizer_files(gguf.file, config),
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: neither a folder with config.json nor a .gguf file")
    return _open_folder(path)


def _open_folder(path: Path) -> Target:
    config = read_llama_config(path)
    source = open_tensors(path)
    config = _resolve_tie(config, source)
    check_tensors(config, source)
    names = ("config.json", "generation_config.json", *TOKENIZER_FILE_NAMES)
    return Target(
        path=path,
        config=config,
        source=source,
        other_files=tuple(path / n for n in names if (path / n).is_file()),
        load_tokenizer_files=lambda: read_tokenizer_files(path, config.bos_token_id, config.eos_token_ids),
    )


def _resolve_tie(config: LlamaConfig, source: TensorSource) -> LlamaConfig:
    """Corrects the tie flag when both matrices are stored: it is the data that decide."""
    names = source.names()
    if not config.tie_word_embeddings or LM_HEAD not in names or EMBEDDING not in names:
        return config
    if source.shape(LM_HEAD) != source.shape(EMBEDDING):
        return replace(config, tie_word_embeddings=False)
    return replace(config, tie_word_embeddings=torch.equal(source.get(LM_HEAD), source.get(EMBEDDING)))


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape ([out, in] for linears) of every weight of a Llama with this config."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_width, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_width, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_width, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_width, config.attention_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def check_tensors(config: LlamaConfig, source: TensorSource) -> None:
    """Compares names, shapes and dtypes of all tensors with the config, without reading data."""
    expected = expected_shapes(config)
    held = {n for n in source.names() if not n.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        held.discard(LM_HEAD)
    file = source.files()[0]
    for name in expected:
        if name not in held:
            hint = "; if the head is tied, set tie_word_embeddings in config.json" if name == LM_HEAD else ""
            raise CheckpointError(
                f"{file}: tensor {name!r} is missing ({_count(expected.keys() - held)} in all); the "
                f"checkpoint is incomplete or config.json belongs to another model{hint}"
            )
    for name in sorted(held - expected.keys()):
        raise CheckpointError(
            f"{_file_of(source, name)}: unexpected tensor {name!r} "
            f"({_count(held - expected.keys())} in all); a Llama with this config does not have it"
        )
    for name, shape in expected.items():
        check_tensor(source, name, shape)


def _file_of(source: TensorSource, name: str) -> Path:
    return source.files()[0].parent / source.where(name)


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}"


def check_tensor(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    """Raises :class:`CheckpointError` unless the tensor has this shape and a 16 or 32 bit float dtype."""
    file = _file_of(source, name)
    if source.shape(name) != shape:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {list(source.shape(name))}, the config asks for {list(shape)}"
        )
    if source.dtype(name) not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {str(source.dtype(name)).removeprefix('torch.')}; "
            f"float32, float16 or bfloat16 is needed"
        )


def check_finite(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> None:
    """Raises :class:`CheckpointError` when the tensor holds NaN or infinity, or would in ``dtype``."""
    flat = source.get(name).reshape(-1)
    where = f"{_file_of(source, name)}: tensor {name!r} has"
    if bad := _count_not_finite(flat, flat.dtype):
        raise CheckpointError(
            f"{where} {bad} NaN or infinite values of {flat.numel()}; the checkpoint is damaged"
        )
    limit = torch.finfo(flat.dtype).max
    if dtype and torch.finfo(dtype).max < limit and (bad := _count_not_finite(flat, dtype)):
        raise CheckpointError(
            f"{where} {bad} value{'s' if bad != 1 else ''} of {flat.numel()} beyond the range of "
            f"{str(dtype).removeprefix('torch.')}; choose bf16 or fp32 with --dtype"
        )


def _count_not_finite(flat: torch.Tensor, dtype: torch.dtype) -> int:
    # In chunks, because isfinite allocates temporaries and an embedding can have 10^9 elements.
    return sum(int((~chunk.to(dtype).isfinite()).sum()) for chunk in flat.split(_CHUNK_ELEMENTS))
