"""Probes B05 (a build ends with a speculative round, and fails with it) and T09 (what counts as a draft)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from speccompile.build import builder, engine_dir
from speccompile.build.builder import build
from speccompile.build.config import make_config
from speccompile.build.progress import Progress
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.target import open_target
from speccompile.cli.main import cli
from speccompile.files import digest_files, list_files
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.runtime import engine as engine_module
from speccompile.tree.named import named_tree
from tests.build.test_engine_dir import tiny_manifest
from tests.build.tiny_pair import write_pair
from tests.runtime.graph import GraphSession


@pytest.fixture
def config(tmp_path: Path):
    target, draft = write_pair(tmp_path)
    paths = {"model": str(target), "draft": str(draft), "output": str(tmp_path / "engine")}
    small = {"backend": "reference", "dtype": "fp32", "max_seq_len": 64, "max_batch_size": 1, "threads": 1}
    return make_config(flags={**paths, **small})


@pytest.fixture
def calls(config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled; the engine of the smoke round gets the graphs as programs.  Lists their calls."""
    target, made = open_target(Path(config.model)), []
    head = open_head(Path(config.draft), target.config)
    llama = load_llama(target.config, target.tensor, torch.float32)
    graph = load_head(head.config, head.tensor, llama, torch.float32)
    limits = config.resolve(target.config, head.config).limits
    ids = draft_token_ids(head.config, head.tensor)
    programs = GraphSession(llama, graph, ids, config.draft_tree(), limits=limits).programs

    def record(name: str):
        def call(*inputs):
            made.append(name)
            if f"break {name}" in made:
                raise RuntimeError(f"{name} is broken")
            return getattr(programs, name)(*inputs)

        return call

    names = ("target_step", "accept", "draft_extend", "draft_step")
    recorded = dataclasses.replace(programs, **{name: record(name) for name in names})
    monkeypatch.setattr(builder, "build_cpu_plugin", lambda _folder: None)
    monkeypatch.setattr(builder, "_compile_programs", lambda *_: None)
    monkeypatch.setattr(engine_module, "_load_programs", lambda _engine: recorded)
    return made


def test_a_build_ends_with_a_speculative_round(config, calls: list[str]) -> None:
    """B05."""
    build(config, Progress(lambda _line: None))
    assert calls.count("draft_extend") >= 1
    assert calls.count("draft_step") >= 3
    assert calls[-1] == "accept"
    assert (Path(config.output) / "manifest.json").is_file()


@pytest.mark.parametrize("program", ["target_step", "accept", "draft_extend", "draft_step"])
def test_a_broken_program_fails_the_build(config, calls: list[str], program: str) -> None:
    """B05: whichever program cannot run, no engine appears."""
    calls.append(f"break {program}")
    with pytest.raises(RuntimeError, match=f"{program} is broken"):
        build(config, Progress(lambda _line: None))
    assert not [path for path in Path(config.output).parent.iterdir() if "engine" in path.name]


def test_inspect_counts_rows_as_drafts_and_the_root(tmp_path: Path) -> None:
    """T09."""
    tree = named_tree("mc_sim_7b_63")

    def write(folder: Path) -> None:
        (folder / engine_dir.TREES).mkdir()
        (folder / engine_dir.TREES / engine_dir.DEFAULT_TREE).write_text(json.dumps(tree.to_json()))
        tiny_manifest(digest_files(list_files(folder), folder)).write(folder)

    engine_dir.publish(tmp_path / "engine", write)
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "engine")], catch_exceptions=False)
    assert "25 drafts, depth 5, 26 rows (drafts + 1)" in shown.output
