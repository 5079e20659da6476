"""What a build is asked for (:class:`BuildConfig`) and what it decided (:class:`ResolvedConfig`).

Every field is a YAML key and a flag of ``speccompile build`` (``max_seq_len`` is ``--max-seq-len``); both
go through the same parser, flags win, and an unknown key is an error.  ``"auto"`` values are replaced by
:meth:`BuildConfig.resolve` before anything is compiled, and the manifest records the result.
Relative paths, in a YAML file too, are relative to the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from speccompile.build import isa
from speccompile.build.values import TreeSpec, auto_or, choice, count, layers, switch, text, tree_spec
from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.errors import ConfigError
from speccompile.limits import Limits
from speccompile.tree.named import check_tree, resolve_tree
from speccompile.tree.tree import Tree

Auto = Literal["auto"]
Backend = Literal["torch", "reference"]
DType = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["none", "int8"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_DEFAULT_MAX_SEQ_LEN = 4096
_DEFAULT_PREFILL_ROWS = 512
_DEFAULT_TREE_DEPTH = 8
_DEFAULT_DRAFT_TOPK = 8


def _key(parse: Callable[[Any], Any], help_text: str) -> dict[str, Any]:
    return {"parse": parse, "help": help_text}


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """One build as asked for.  ``max_*`` sizes are in tokens, rows or requests; threads are CPU threads."""

    model: str = field(metadata=_key(text, "Target model: a Hugging Face folder or a GGUF file."))
    output: str = field(metadata=_key(text, "Engine directory to write."))
    draft: str | None = field(
        default=None, metadata=_key(text, "EAGLE head folder; without it the engine decodes plainly.")
    )
    backend: Backend = field(
        default="torch",
        metadata=_key(choice("torch", "reference"), "Lowering: torch (compiled) or reference."),
    )
    dtype: DType | Auto = field(
        default="auto",
        metadata=_key(
            choice("auto", *TORCH_DTYPES), "bf16, fp16 or fp32. auto: bf16 if the CPU has it, else fp32."
        ),
    )
    quantization: Quantization = field(
        default="none",
        metadata=_key(
            choice("none", "int8"), "Weights of target and head: none (as dtype) or int8 (linear layers)."
        ),
    )
    calibration: str | None = field(
        default=None,
        metadata=_key(
            text, "JSONL texts on which the int8 target is compared. Without it: a few built-in ones."
        ),
    )
    max_batch_size: int = field(default=8, metadata=_key(count, "Most requests that run together."))
    max_seq_len: int | Auto = field(
        default="auto",
        metadata=_key(
            auto_or(count), "Most tokens of a request, prompt included. auto: min(the model's, 4096)."
        ),
    )
    max_rows: int | Auto = field(
        default="auto",
        metadata=_key(auto_or(count), "Most token rows of one call, all requests together. auto: 512."),
    )
    block_size: int = field(default=32, metadata=_key(count, "Tokens per KV block."))
    tree: TreeSpec = field(
        default="auto",
        metadata=_key(tree_spec, "Draft tree: a name, a file, or off. auto: the default tree."),
    )
    max_tree_depth: int | Auto = field(
        default="auto",
        metadata=_key(auto_or(count), "Deepest tree that `run --tree` may use. auto: 8, or the tree's own."),
    )
    draft_topk: int | Auto = field(
        default="auto",
        metadata=_key(auto_or(count), "Candidates kept per tree node. auto: 8, or what the tree needs."),
    )
    threads: int | Auto = field(
        default="auto", metadata=_key(auto_or(count), "CPU threads of the programs. auto: torch's default.")
    )
    norm_before_residual: bool | Auto = field(
        default="auto",
        metadata=_key(auto_or(switch), "Overrides the head's norm_before_residual (true or false)."),
    )
    aux_layers: tuple[int, ...] | Auto = field(
        default="auto",
        metadata=_key(
            auto_or(layers), "Overrides the target layers that feed an EAGLE-3 head, such as 2,15,27."
        ),
    )
    smoke: bool = field(
        default=True, metadata=_key(switch, "Run one dummy generation before the engine is published.")
    )

    def __post_init__(self) -> None:
        if self.draft is None and self.tree not in ("auto", "off"):
            raise ConfigError("tree needs draft: give --draft HEAD, or leave --tree out")
        if self.draft is not None and Path(self.draft).resolve() == Path(self.model).resolve():
            raise ConfigError(f"draft: {self.draft} is the target model itself; give the EAGLE head's folder")
        if self.calibration is not None and self.quantization == "none":
            raise ConfigError("calibration needs quantization: give --quantization int8, or leave it out")

    def draft_tree(self) -> Tree:
        """The tree the engine uses unless a request asks for another.  Raises ConfigError."""
        if self.tree == "auto":
            return resolve_tree("off" if self.draft is None else "default")
        return resolve_tree(self.tree)

    def resolve(self, target: LlamaConfig, head: HeadConfig | None) -> ResolvedConfig:
        """Replace every ``auto``.  Raises ConfigError when a given size cannot hold."""
        tree = self.draft_tree()
        max_seq_len = _or(self.max_seq_len, min(target.max_position_embeddings, _DEFAULT_MAX_SEQ_LEN))
        values: dict[str, Any] = {
            "dtype": _or(self.dtype, "bf16" if isa.has_bf16() else "fp32"),
            "max_seq_len": max_seq_len,
            "max_rows": _or(self.max_rows, _default_rows(max_seq_len, self.max_batch_size, tree)),
            "tree": tree.name if self.tree == "auto" else self.tree,
            "max_tree_depth": _or(self.max_tree_depth, max(_DEFAULT_TREE_DEPTH, tree.depth)) if head else 0,
            "draft_topk": _or(self.draft_topk, _default_topk(target, tree)) if head else 0,
            "threads": _or(self.threads, torch.get_num_threads()),
            "norm_before_residual": head.norm_before_residual if head else False,
            "aux_layers": head.aux_layers if head else (),
        }
        resolved = ResolvedConfig(**{**_as_dict(self), **values})
        if resolved.threads > (cpus := max(os.cpu_count() or 1, torch.get_num_threads())):
            raise ConfigError(
                f"threads: {resolved.threads} is more than this machine's CPUs; give at most {cpus}"
            )
        _check_limit("max_seq_len", max_seq_len, target.max_position_embeddings, "max_position_embeddings")
        _check_limit("draft_topk", resolved.draft_topk, target.vocab_size, "vocab_size")
        check_tree(
            tree,
            draft_topk=resolved.draft_topk,
            max_depth=resolved.max_tree_depth,
            max_rows=resolved.max_rows // resolved.max_batch_size,
        )
        return resolved


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(BuildConfig):
    """A :class:`BuildConfig` without ``auto`` (sizes of the draft are 0 without a head)."""

    dtype: DType
    max_seq_len: int
    max_rows: int
    max_tree_depth: int
    draft_topk: int
    threads: int
    norm_before_residual: bool
    aux_layers: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The engine's dtype."""
        return TORCH_DTYPES[self.dtype]

    @property
    def limits(self) -> Limits:
        """The sizes the programs are compiled for."""
        return Limits(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_rows=self.max_rows,
            max_tree_depth=self.max_tree_depth,
            draft_topk=self.draft_topk,
            block_size=self.block_size,
        )


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value


def _default_topk(target: LlamaConfig, tree: Tree) -> int:
    return min(target.vocab_size, max(_DEFAULT_DRAFT_TOPK, tree.max_rank + 1))


def _default_rows(max_seq_len: int, max_batch_size: int, tree: Tree) -> int:
    return max(min(_DEFAULT_PREFILL_ROWS, max_seq_len), max_batch_size * tree.rows)


def _as_dict(config: BuildConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _check_limit(name: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise ConfigError(f"{name}: {value} is more than the model's {what}, {limit}; give at most {limit}")


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for a key of ``given`` that is not in ``known``, with the closest known one."""
    known = list(known)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a recipe.  Raises ConfigError for a file that is missing or no YAML mapping."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    return data


def make_config(*, recipe: Path | None = None, flags: Mapping[str, Any] | None = None) -> BuildConfig:
    """A config from a YAML recipe and flags; flags win.

    ``flags`` are field names with raw values (text from a command line, or Python values).
    Raises ConfigError that names the file or flag, the key and what is expected.
    """
    values: dict[str, Any] = {}
    if recipe is not None:
        values.update(_parse(read_yaml(recipe), str(recipe)))
    values.update(_parse(flags or {}, "flags"))
    for name in ("model", "output"):
        if name not in values:
            raise ConfigError(f"{name}: missing; give --{name} or the YAML key")
    return BuildConfig(**values)


def _parse(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    parsers = {f.name: f.metadata["parse"] for f in dataclasses.fields(BuildConfig)}
    check_keys(raw, parsers, where)
    values = {}
    for key, value in raw.items():
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}, got {value!r}") from error
    return values


def config_from_manifest(data: Mapping[str, Any]) -> ResolvedConfig:
    """Inverse of ``dataclasses.asdict`` for a resolved config read back from JSON.

    Raises TypeError for a missing or surplus key.
    """

    def tuples(value: Any) -> Any:
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    names = {f.name for f in dataclasses.fields(ResolvedConfig)}
    if names != set(data):
        raise TypeError(f"config: missing or unknown keys {', '.join(sorted(names ^ set(data)))}")
    return ResolvedConfig(**{key: tuples(value) for key, value in data.items()})
