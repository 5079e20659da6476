"""A build from start to end: read, check, export, compile, package, try, publish.

Everything that can be refused is refused before anything is compiled; everything is written into a
temporary folder and appears at ``config.output`` only when the smoke round has passed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from speccompile import __version__
from speccompile.build import engine_dir, isa
from speccompile.build.accuracy import quantize_and_compare
from speccompile.build.calibration import BUILT_IN, read_calibration
from speccompile.build.config import BuildConfig, ResolvedConfig
from speccompile.build.lowering import get_lowering
from speccompile.build.manifest import FORMAT_VERSION, Manifest, QuantizationReport
from speccompile.build.plugin import PLUGIN_NAME, build_cpu_plugin, load_plugin
from speccompile.build.programs import export_programs
from speccompile.build.progress import Progress, peak_memory
from speccompile.checkpoint.head_layout import head_shapes
from speccompile.checkpoint.heads import Head, HeadOverrides, open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import Target, open_target
from speccompile.checkpoint.tokenizer_files import TokenizerFiles
from speccompile.contract import contract_to_json
from speccompile.errors import BuildError
from speccompile.files import FileDigest, digest_files, list_files, size_text
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.tree.tree import Tree

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers")
_SPARE_BYTES = 64 << 20
_SMOKE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build made: bytes of the engine, peak resident bytes, seconds per stage and in total."""

    output: str
    config: ResolvedConfig
    size: int
    peak_memory: int
    times: dict[str, float]
    quantization: QuantizationReport | None

    def summary(self) -> str:
        """One line for people, a second one for a quantized engine."""
        line = (
            f"engine {self.output}: {size_text(self.size)}, {self.times['total']:.0f} s, "
            f"peak memory {size_text(self.peak_memory)}"
        )
        return line if self.quantization is None else f"{line}\n{self.quantization.summary()}"


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What was read and checked."""

    target: Target
    head: Head | None
    config: ResolvedConfig
    tree: Tree
    calibration: tuple[torch.Tensor, ...]
    sources: tuple[FileDigest, ...]


def build(config: BuildConfig, progress: Progress) -> BuildReport:
    """Build the engine that ``config`` asks for; a SpeccompileError leaves ``output`` as it was."""
    inputs = _read(config, progress)
    _check_disk(inputs)
    manifests: list[Manifest] = []

    def write(folder: Path) -> None:
        manifest = _write_engine(folder, inputs, progress)
        manifest.write(folder)
        if config.smoke:
            with progress.stage("smoke", "smoke round"):
                _smoke(folder, inputs)
        times = {**progress.times, "total": progress.total}
        manifests.append(replace(manifest, times=times, peak_memory=peak_memory()))
        manifests[-1].write(folder)

    engine_dir.publish(Path(config.output), write)
    manifest = manifests[-1]
    return BuildReport(
        output=config.output,
        config=inputs.config,
        size=sum(item.size for item in manifest.files),
        peak_memory=manifest.peak_memory,
        times=manifest.times,
        quantization=manifest.quantization,
    )


def _read(config: BuildConfig, progress: Progress) -> _Inputs:
    """Open target, head and tree; refuse what does not fit together; read every weight once."""
    tree = config.draft_tree()
    with progress.stage("read", f"read {config.model}" + (f" and {config.draft}" if config.draft else "")):
        target = open_target(Path(config.model))
        head = _open_head(config, target)
        resolved = config.resolve(target.config, head.config if head else None)
        tokenizer = target.tokenizer  # read here so that a missing one is found before compilation
        texts = _calibration(resolved, tokenizer)
    with progress.stage("check", "check weights"):
        target.check_values(resolved.torch_dtype)
        if head:
            head.check_values(resolved.torch_dtype)
    with progress.stage("digest", "digest source files"):
        sources = source_digests(target, head, progress)
    return _Inputs(target=target, head=head, config=resolved, tree=tree, calibration=texts, sources=sources)


def _calibration(config: ResolvedConfig, tokenizer: TokenizerFiles) -> tuple[torch.Tensor, ...]:
    if config.quantization == "none":
        return ()
    path = BUILT_IN if config.calibration is None else Path(config.calibration)
    return tuple(read_calibration(path, tokenizer, config.max_seq_len))


def _open_head(config: BuildConfig, target: Target) -> Head | None:
    if config.draft is None:
        return None
    overrides = HeadOverrides(
        norm_before_residual=None if config.norm_before_residual == "auto" else config.norm_before_residual,
        aux_layers=None if config.aux_layers == "auto" else config.aux_layers,
    )
    return check_pair(target, open_head(Path(config.draft), target.config, overrides=overrides))


def source_digests(target: Target, head: Head | None, progress: Progress) -> tuple[FileDigest, ...]:
    """Digests of the files an engine depends on, as ``model/NAME`` and ``draft/NAME``."""
    out: tuple[FileDigest, ...] = ()
    for prefix, source in (("model/", target), ("draft/", head)):
        if source is not None:
            base = source.path if source.path.is_dir() else source.path.parent
            out += digest_files(progress.bar(source.digest_files(), "file"), base, prefix)
    return out


def _check_disk(inputs: _Inputs) -> None:
    """Refuse before compiling when the engine, or the compiler's temporary copy of it, cannot fit."""
    itemsize = inputs.config.torch_dtype.itemsize
    linear_itemsize = 1 if inputs.config.quantization == "int8" else itemsize
    config = inputs.target.config
    matrix = config.vocab_size * config.hidden_size
    # The embedding table and the packed output matrix are both stored, tied or not.
    tables, linears = matrix, sum(map(prod, inputs.target.expected_shapes.values()))
    linears -= 0 if config.tie_word_embeddings else matrix
    if inputs.head:
        tables += 2 * matrix
        linears += 2 * (sum(map(prod, head_shapes(inputs.head.config).values())) + matrix)
    need = tables * itemsize + linears * linear_itemsize + _SPARE_BYTES
    output = Path(inputs.config.output).resolve()
    folder = next(parent for parent in output.parents if parent.is_dir())
    for where in (folder, Path(tempfile.gettempdir())):
        if (free := shutil.disk_usage(where).free) < need:
            raise BuildError(
                f"{where}: {free >> 20} MiB free, about {need >> 20} MiB are needed; free some space"
                " or set --output (engine) or TMPDIR (compiler) elsewhere"
            )


def _write_engine(folder: Path, inputs: _Inputs, progress: Progress) -> Manifest:
    for name in (engine_dir.PROGRAMS, engine_dir.LIB, engine_dir.TOKENIZER, engine_dir.TREES):
        (folder / name).mkdir()
    with progress.stage("plugin", "compile CPU kernels"):
        build_cpu_plugin(folder / engine_dir.LIB)
    with progress.stage("programs", f"compile programs ({inputs.config.backend}, {inputs.config.dtype})"):
        quantization = _compile_programs(folder, inputs, progress)
    inputs.target.tokenizer.write(folder / engine_dir.TOKENIZER)
    tree_file = folder / engine_dir.TREES / engine_dir.DEFAULT_TREE
    tree_file.write_text(json.dumps(inputs.tree.to_json()) + "\n", encoding="utf-8")
    with progress.stage("package", "digest engine files"):
        files = digest_files(progress.bar(list_files(folder), "file"), folder)
    return Manifest(
        format_version=FORMAT_VERSION,
        contract=contract_to_json(),
        config=inputs.config,
        target=inputs.target.config,
        head=inputs.head.config if inputs.head else None,
        quantization=quantization,
        sources=inputs.sources,
        files=files,
        versions=_versions(),
        machine=isa.machine(),
        cpu_features=isa.cpu_features(),
        argv=tuple(sys.argv),
        git_sha=_git_sha(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        peak_memory=peak_memory(),
        times=dict(progress.times),
    )


def _compile_programs(folder: Path, inputs: _Inputs, progress: Progress) -> QuantizationReport | None:
    config, lowering = inputs.config, get_lowering(inputs.config.backend)
    torch.set_num_threads(config.threads)  # Inductor writes the number into its loops
    target = load_llama(inputs.target.config, inputs.target.tensor, config.torch_dtype)
    head = token_ids = None
    if inputs.head:
        head = load_head(inputs.head.config, inputs.head.tensor, target, config.torch_dtype)
        token_ids = draft_token_ids(inputs.head.config, inputs.head.tensor)
    report = None
    if config.quantization == "int8":
        with progress.stage("quantize", "  quantize and compare"):
            load_plugin(folder / engine_dir.LIB / PLUGIN_NAME)
            name = config.calibration or "built-in texts"
            report = quantize_and_compare(target, head, inputs.calibration, name)
        progress.note(f"  {report.summary()}")
    for name, program in progress.bar(export_programs(target, head, token_ids, config.limits), "program"):
        with progress.stage(name, f"  {name}"):
            lowering.compile(program, folder / engine_dir.PROGRAMS / name)
    return report


def _smoke(folder: Path, inputs: _Inputs) -> None:
    """One short generation, speculative if there is a head, by the finished engine."""
    engine = Engine.load(folder)
    params = SamplingParams(max_tokens=min(_SMOKE_TOKENS, inputs.config.max_seq_len - 1), ignore_eos=True)
    first = inputs.target.config.bos_token_id or 0
    done = engine.complete([first], params)
    if done.completion_tokens != params.max_tokens:
        raise BuildError(
            f"smoke round: {done.completion_tokens} tokens instead of {params.max_tokens}; please report this"
        )


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"speccompile": __version__, "python": platform.python_version(), **found}


def _git_sha() -> str | None:
    """Commit of the repository this package runs from; None for an installed one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    answer = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None
