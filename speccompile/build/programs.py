"""Exports the four contract programs with ``torch.export``.

Owns the example inputs and the dynamic dimensions; a lowering receives finished
``ExportedProgram`` objects and knows nothing of the model.  One target program serves prefill
chunks, plain steps and trees, because the number of rows is dynamic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.contract import PROGRAMS, ProgramSpec, TensorSpec
from speccompile.limits import Limits, kv_block_shapes
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.model.programs import Accept, DraftExtend, DraftStep, TargetStep

_DTYPES = {"i64": torch.int64, "i32": torch.int32, "f32": torch.float32}
_EXAMPLE = {"T": 6, "R": 3, "N": 5, "S": 7, "M": 4, "W": 2, "blocks": 16}


class _Signature:
    """Example inputs and dynamic shapes of one program, derived from its contract entry."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype, limits: Limits, min_rows: int = 1) -> None:
        self.sizes, self.dtype = sizes, dtype
        rows = limits.max_rows
        bounds = {"T": rows, "N": rows, "S": rows, "R": limits.max_batch_size}
        least = {"T": min_rows, "N": min_rows}
        bounds["M"] = -(-limits.max_seq_len // limits.block_size)
        bounds["W"] = -(-limits.max_rows // 64)
        # The example must lie within the range, so small limits are rounded up to it.
        self.dims: dict[str, Any] = {
            k: Dim(k, min=least.get(k, 1), max=max(bound, _EXAMPLE[k])) for k, bound in bounds.items()
        }
        self.dims["blocks"] = Dim("blocks", min=1, max=2**30)

    def _axis(self, letter: str) -> tuple[int, Any]:
        if letter in _EXAMPLE:
            return _EXAMPLE[letter], self.dims[letter]
        return self.sizes[letter], None

    def tensor(self, spec: TensorSpec) -> tuple[Tensor, Any]:
        """Example tensor and its dynamic-shape entry; ``R1`` means R + 1."""
        if spec.dims == "R1":
            return torch.zeros(_EXAMPLE["R"] + 1, dtype=torch.int32), {0: self.dims["R"] + 1}
        axes = [self._axis(letter) for letter in spec.dims]
        dtype = self.dtype if spec.dtype == "model" else _DTYPES[spec.dtype]
        dynamic = {i: dim for i, (_, dim) in enumerate(axes) if dim is not None}
        return torch.zeros([size for size, _ in axes], dtype=dtype), dynamic

    def cache(self, shape: tuple[int, int, int, int]) -> tuple[list[Tensor], list[Any]]:
        """``layers`` cache tensors [blocks, *shape[1:]] and their dynamic-shape entries."""
        layers, *rest = shape
        tensors = [torch.zeros(_EXAMPLE["blocks"], *rest, dtype=self.dtype) for _ in range(layers)]
        return tensors, [{0: self.dims["blocks"]} for _ in range(layers)]


def _export(
    module: nn.Module, spec: ProgramSpec, sign: _Signature, owner: Any, block: int
) -> ExportedProgram:
    args: list[Any] = []
    shapes: list[Any] = []
    for item in spec.inputs:
        if item.dtype == "kv":
            for shape in kv_block_shapes(owner, block):
                example, dynamic = sign.cache((owner.num_hidden_layers, *shape))
                args.append(example)
                shapes.append(dynamic)
        else:
            example_t, dynamic_t = sign.tensor(item)
            args.append(example_t)
            shapes.append(dynamic_t)
    with torch.no_grad():
        return export(module, tuple(args), dynamic_shapes=tuple(shapes), strict=False)


def export_target_step(module: nn.Module, target: Llama, limits: Limits) -> ExportedProgram:
    """``module`` over the graph of ``target``, with the inputs of ``target_step``."""
    sign = _Signature({}, target.embed_tokens.weight.dtype, limits, limits.min_target_rows)
    return _export(module.eval(), PROGRAMS["target_step"], sign, target.config, limits.block_size)


def export_programs(
    target: Llama, head: EagleHead | None, token_ids: Tensor | None, limits: Limits
) -> Iterator[tuple[str, ExportedProgram]]:
    """Yield ``(name, program)`` one at a time; without a head only ``target_step`` and ``accept``."""
    config = target.config
    aux = head.config.aux_layers if head else ()
    feature = head.config.feature_size if head else config.hidden_size
    sizes = {"V": config.vocab_size, "F": feature, "K": limits.draft_topk}
    sizes["h"] = head.config.hidden_size if head else config.hidden_size
    dtype = target.embed_tokens.weight.dtype
    yield "target_step", export_target_step(TargetStep(target, aux), target, limits)
    modules: dict[str, tuple[nn.Module, LlamaConfig | HeadConfig]] = {
        "accept": (Accept(limits.max_path), config),
    }
    if head is not None and token_ids is not None:
        modules["draft_extend"] = (DraftExtend(head, token_ids, limits.draft_topk), head.config)
        modules["draft_step"] = (DraftStep(head, token_ids, limits.draft_topk), head.config)
    for name, (module, owner) in modules.items():
        sign = _Signature(sizes, dtype, limits)
        yield name, _export(module.eval(), PROGRAMS[name], sign, owner, limits.block_size)
