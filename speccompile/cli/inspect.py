"""``speccompile inspect``: the manifest for people or as JSON, and the trees drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from speccompile.build.engine_dir import EngineDir, load_engine_dir
from speccompile.build.manifest import Manifest, QuantizationReport
from speccompile.build.table_file import read_table
from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.cli.show import echo_json, table
from speccompile.cli.tree_tables import choice_table, tree_drawings, trial_table
from speccompile.files import size_text
from speccompile.tree.draw import draw


@click.command("inspect")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Compare the digest of every file, however large.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest and the tree as one JSON object.")
def command(engine: Path, verify: bool, as_json: bool) -> None:
    """Show what is in an engine directory."""
    loaded = load_engine_dir(engine, verify=verify)
    if as_json:
        tuned = read_table(loaded.path, loaded.manifest)
        found = {"table": tuned[0].to_json(), "report": tuned[1]} if tuned else None
        trees = {"tree": loaded.tree().to_json(), "tuned": found}
        echo_json({**loaded.manifest.to_json(), **trees, "verified": verify})
        return
    click.echo(_describe(loaded))
    if verify:
        click.echo(f"verified: all {len(loaded.manifest.files)} files are as they were built")


def _describe(engine: EngineDir) -> str:
    manifest = engine.manifest
    parts = [table(_summary(engine.path, manifest)), _files(manifest), draw(engine.tree())]
    if tuned := read_table(engine.path, manifest):
        trees, report = tuned
        parts += [choice_table(report["choices"]), trial_table(report["trials"]), tree_drawings(trees)]
    return "\n\n".join(parts)


def _summary(path: Path, manifest: Manifest) -> list[tuple[str, Any]]:
    config = manifest.config
    size = sum(item.size for item in manifest.files)
    return [
        ("engine", f"{path} (format {manifest.format_version}, {size_text(size)})"),
        ("target", _target(manifest.target)),
        ("head", "none" if manifest.head is None else _head(manifest.head)),
        ("programs", f"{config.backend}, {config.dtype}, {config.threads} threads"),
        *_quantization(manifest.quantization),
        (
            "limits",
            f"{config.max_seq_len} tokens, {config.max_batch_size} requests, {config.max_rows} rows a call, "
            f"tree depth {config.max_tree_depth}, {config.draft_topk} candidates per node",
        ),
        ("KV cache", f"blocks of {config.block_size} tokens"),
        ("sources", f"{config.model}" + (f", {config.draft}" if config.draft else "")),
        ("built", _built(manifest)),
        ("needs", f"{manifest.machine}: {', '.join(manifest.cpu_features) or 'no special features'}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _quantization(report: QuantizationReport | None) -> list[tuple[str, Any]]:
    if report is None:
        return []
    return [("weights", report.summary()), ("not int8", ", ".join(report.kept))]


def _target(target: LlamaConfig) -> str:
    return (
        f"Llama, {target.num_hidden_layers} layers, hidden {target.hidden_size}, "
        f"{target.num_attention_heads}/{target.num_key_value_heads} heads, vocabulary {target.vocab_size}"
    )


def _head(head: HeadConfig) -> str:
    aux = f", aux layers {list(head.aux_layers)}" if head.aux_layers else ""
    layers = f"{head.num_hidden_layers} layer" + ("s" if head.num_hidden_layers != 1 else "")
    return f"{head.kind}, {layers}, hidden {head.hidden_size}, draft vocabulary {head.draft_vocab_size}{aux}"


def _built(manifest: Manifest) -> str:
    commit = f", commit {manifest.git_sha[:12]}" if manifest.git_sha else ""
    seconds = manifest.times.get("total", 0.0)
    return f"{manifest.created}, {seconds:.0f} s, peak memory {size_text(manifest.peak_memory)}{commit}"


def _files(manifest: Manifest) -> str:
    return table([(item.path, size_text(item.size), item.sha256[:16]) for item in manifest.files])
