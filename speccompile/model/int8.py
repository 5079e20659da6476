"""Linear layers with 8-bit weights, and the pass that puts them into a loaded graph.

Attention and feed-forward projections and ``lm_head`` are replaced.  Embeddings stay: a lookup reads one row
and gains nothing.  A head's ``fc`` stays: it reads unlike vectors side by side (embedding and hidden, or
features of several layers), and one scale for the whole row would drown the smallest of them.

A few inputs are far larger than the others, and would take the row's scale for themselves; so each input is
divided by, and its weights are multiplied with, a power of two that balances their ranges (SmoothQuant, arXiv
2211.10438, equation 4).  Powers of two change nothing but the rounding to 8 bits.
Legend as in :mod:`speccompile.model.layers`; N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speccompile import ops
from speccompile.ops.int8_linear import pack_weight, quantize_weight

_ALPHA = 0.6  # share of the inputs' range; the best of 0.5, 0.6, 0.7, 0.8 and 0.9 on SmolLM2-135M
_WIDEST = 12  # log2 of the largest ratio of two divisors: float16 activations must survive the division
_TINY = 2.0**-60
_REPLACED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def balancing_divisor(largest_K: Tensor, weight_NK: Tensor) -> Tensor:
    """Powers of two near input ** alpha / weight ** (1 - alpha), f32 [K], the smallest of them 1."""
    input_K = largest_K.float().clamp(min=_TINY).log2()
    weight_K = weight_NK.float().abs().amax(0).clamp(min=_TINY).log2()
    exponent_K = (_ALPHA * input_K - (1 - _ALPHA) * weight_K).round()
    exponent_K = exponent_K.clamp(min=exponent_K.max() - _WIDEST)
    return torch.exp2(exponent_K - exponent_K.min())


class Int8Linear(nn.Module):
    """``linear`` with packed 8-bit weights; returns ``out_dtype``, or the dtype of its input.

    ``largest_K``: largest magnitude of each input, f32 [K], as met on sample texts.
    """

    weight: Tensor
    scale: Tensor
    factor: Tensor

    def __init__(self, linear: nn.Linear, largest_K: Tensor, out_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        weight_NK = linear.weight.detach()
        divisor_K = balancing_divisor(largest_K, weight_NK)
        integer_NK, scale_N = quantize_weight(weight_NK.float() * divisor_K)
        self.register_buffer("factor", (1 / divisor_K).to(weight_NK.dtype))
        self.register_buffer("weight", pack_weight(integer_NK))
        self.register_buffer("scale", scale_N)
        self.bias, self.out_dtype = linear.bias, out_dtype

    def forward(self, x: Tensor) -> Tensor:
        y = ops.int8_linear((x * self.factor).flatten(0, -2), self.weight, self.scale)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.unflatten(0, x.shape[:-1]).to(self.out_dtype or x.dtype)


def _replaced(model: nn.Module) -> dict[str, nn.Linear]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and n.rpartition(".")[2] in _REPLACED}


def measure_inputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Largest magnitude of each input, f32 [K], of every layer to be replaced, met during ``run``."""
    largest = {name: torch.zeros(linear.in_features) for name, linear in _replaced(model).items()}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            met_K = inputs[0].flatten(0, -2).abs().amax(0).float()
            largest[name] = torch.maximum(largest[name], met_K)

        return note

    hooks = [m.register_forward_pre_hook(watch(name)) for name, m in _replaced(model).items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return largest


def quantize_linears(model: nn.Module, largest: dict[str, Tensor]) -> None:
    """Replace the linear layers of a target or a head, one at a time; ``lm_head`` then returns float32.

    ``largest`` is what :func:`measure_inputs` returned.
    """
    for name, linear in _replaced(model).items():
        owner, _, leaf = name.rpartition(".")
        out_dtype = torch.float32 if leaf == "lm_head" else None
        setattr(model.get_submodule(owner), leaf, Int8Linear(linear, largest[name], out_dtype))


def unquantized_weights(model: nn.Module) -> list[str]:
    """Names of the matrices that keep the engine's dtype."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
