"""The tensors of a Llama GGUF file under Hugging Face names and in Hugging Face row order.

F16, F32 and BF16 tensors keep their dtype; quantized ones are dequantized to float32, one tensor at a time.
Converters store the rows of q and k with the two halves of each head interleaved (llama.cpp rotates pairs of
neighbours); they are put back here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.checkpoint.gguf_file import GgufFile, gguf_llama_config
from speccompile.checkpoint.tensors import TensorSource, unknown_tensor
from speccompile.errors import CheckpointError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufTensors(TensorSource):
    """Opening reads metadata only.  ``file`` and ``config`` are what the rest of the target is made of."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.config = gguf_llama_config(self.file)
        self._tensors: dict[str, Any] = {}
        for name, tensor in self.file.tensors.items():
            if name == "rope_freqs.weight":
                continue
            kind = tensor.tensor_type.name
            if kind not in _PLAIN and kind not in _QUANTIZED:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has type {kind}, which is not supported; "
                    f"one of {', '.join((*_PLAIN, *_QUANTIZED))} is"
                )
            self._tensors[_hf_name(name)] = tensor

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise unknown_tensor(self.file.path, name)
        return self._tensors[name]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(d) for d in reversed(self._tensor(name).shape))

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(self._tensor(name).tensor_type.name, torch.float32)

    def get(self, name: str) -> torch.Tensor:
        tensor = _to_torch(self._tensor(name)).reshape(self.shape(name))
        if ".q_proj." in name:
            return _unpermute(tensor, self.config.num_attention_heads)
        if ".k_proj." in name:
            return _unpermute(tensor, self.config.num_key_value_heads)
        return tensor

    def where(self, name: str) -> str:  # noqa: ARG002
        return self.file.path.name

    def files(self) -> list[Path]:
        return [self.file.path]


def _hf_name(name: str) -> str:
    """The Hugging Face name; a name that Llama does not have stays as it is and is refused as unexpected."""
    match = _LAYER_PATTERN.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _GLOBAL_NAMES.get(name, name)


def _to_torch(tensor: Any) -> torch.Tensor:
    import gguf

    kind = tensor.tensor_type.name
    if kind == "BF16":
        return torch.from_numpy(np.array(tensor.data).view(np.int16)).view(torch.bfloat16)
    if kind in _PLAIN:
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type)))


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, ...] rows (pair, half) of each head -> rows (half, pair)."""
    pairs = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, pairs, 2, -1).transpose(1, 2).reshape(tensor.shape).contiguous()
