"""The program contract: names, dtypes and dimensions of what joins build and runtime.

The builder exports programs with these signatures, the manifest stores :func:`contract_to_json`,
and the runtime compares it with its own copy when an engine is loaded.  Dimension letters follow
the legend in ``ARCHITECTURE.md``; ``"kv"`` stands for two lists of per-layer cache tensors
(keys, then values) that the program updates in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONTRACT_VERSION = 1


@dataclass(frozen=True)
class TensorSpec:
    """One in- or output.  ``dtype``: ``i64``, ``i32``, ``f32``, ``model`` (that of the engine) or ``kv``."""

    name: str
    dtype: str
    dims: str = ""


@dataclass(frozen=True)
class ProgramSpec:
    """One compiled program: ordered inputs and outputs."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


_LAYOUT = (
    TensorSpec("position", "i64", "T"),
    TensorSpec("mask", "i64", "TW"),
    TensorSpec("cu_rows", "i32", "R1"),
    TensorSpec("prefix_len", "i32", "R"),
    TensorSpec("suffix_start", "i32", "R"),
    TensorSpec("block_table", "i32", "RM"),
)
_BATCH = (TensorSpec("token", "i64", "T"), *_LAYOUT)

TARGET_STEP = ProgramSpec(
    "target_step",
    (*_BATCH, TensorSpec("logit_row", "i64", "N"), TensorSpec("target_kv", "kv")),
    (TensorSpec("logits", "f32", "NV"), TensorSpec("feature", "model", "TF")),
)
DRAFT_EXTEND = ProgramSpec(
    "draft_extend",
    (
        *_BATCH,
        TensorSpec("feature", "model", "SF"),
        TensorSpec("feature_row", "i64", "T"),
        TensorSpec("out_row", "i64", "N"),
        TensorSpec("temperature", "f32", "N"),
        TensorSpec("seed", "i64", "N"),
        TensorSpec("draft_kv", "kv"),
    ),
    (TensorSpec("hidden", "model", "Nh"), TensorSpec("topk", "i64", "NK")),
)
DRAFT_STEP = ProgramSpec(
    "draft_step",
    (
        *_LAYOUT,
        TensorSpec("hidden", "model", "Sh"),
        TensorSpec("topk", "i64", "SK"),
        TensorSpec("parent_row", "i64", "T"),
        TensorSpec("rank", "i64", "T"),
        TensorSpec("temperature", "f32", "T"),
        TensorSpec("seed", "i64", "T"),
        TensorSpec("draft_kv", "kv"),
    ),
    (TensorSpec("hidden", "model", "Th"), TensorSpec("topk", "i64", "TK")),
)
ACCEPT = ProgramSpec(
    "accept",
    (
        TensorSpec("logits", "f32", "NV"),
        TensorSpec("token", "i64", "N"),
        TensorSpec("parent", "i64", "N"),
        TensorSpec("position", "i64", "N"),
        TensorSpec("cu_rows", "i32", "R1"),
        TensorSpec("prefix_len", "i32", "R"),
        TensorSpec("block_table", "i32", "RM"),
        TensorSpec("temperature", "f32", "R"),
        TensorSpec("top_k", "i64", "R"),
        TensorSpec("top_p", "f32", "R"),
        TensorSpec("min_p", "f32", "R"),
        TensorSpec("seed", "i64", "R"),
        TensorSpec("target_kv", "kv"),
    ),
    (TensorSpec("drawn", "i64", "N"), TensorSpec("path", "i64", "RP"), TensorSpec("path_len", "i64", "R")),
)

PROGRAMS: dict[str, ProgramSpec] = {p.name: p for p in (TARGET_STEP, DRAFT_EXTEND, DRAFT_STEP, ACCEPT)}


def contract_to_json() -> dict[str, Any]:
    """JSON form stored in the manifest: ``{"version": ..., "programs": {name: {"inputs": [...], ...}}}``."""

    def spec(items: tuple[TensorSpec, ...]) -> list[list[str]]:
        return [[t.name, t.dtype, t.dims] for t in items]

    return {
        "version": CONTRACT_VERSION,
        "programs": {n: {"inputs": spec(p.inputs), "outputs": spec(p.outputs)} for n, p in PROGRAMS.items()},
    }
