"""What a build refuses before it compiles anything, and what it does when the last step fails."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.build import builder
from speccompile.build.builder import build
from speccompile.build.config import make_config
from speccompile.build.progress import Progress
from speccompile.errors import BuildError, CheckpointError, ConfigError, PairError, RequestError
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from tests.build.tiny_pair import write_pair


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path)


def config_for(pair, tmp_path, **flags):
    base = {"model": str(pair[0]), "draft": str(pair[1]), "output": str(tmp_path / "engine")}
    small = {"backend": "reference", "dtype": "fp32", "max_seq_len": 64, "max_batch_size": 1, "threads": 1}
    return make_config(flags={**base, **small, **flags})


@pytest.fixture
def no_compiler(monkeypatch):
    """Fail the test if anything is compiled."""

    def compiled(*_args, **_kwargs):
        raise AssertionError("compiled something")

    monkeypatch.setattr(builder, "build_cpu_plugin", compiled)
    monkeypatch.setattr(builder, "export_programs", compiled)


def refuse(config, tmp_path, error, message):
    with pytest.raises(error, match=message):
        build(config, Progress(lambda _line: None))
    assert not [p for p in tmp_path.iterdir() if "engine" in p.name]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.usefixtures("no_compiler")
def test_nan_weights_are_named(pair, tmp_path, which):
    file = pair[which] / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    refuse(config_for(pair, tmp_path), tmp_path, CheckpointError, f"{file}.*{name}.*1 NaN")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.usefixtures("no_compiler")
def test_values_beyond_the_dtype_are_named(pair, tmp_path, which):
    """Probe Q07: as float16 they would be infinite."""
    file = pair[which] / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[3] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    refuse(config_for(pair, tmp_path, dtype="fp16"), tmp_path, CheckpointError, f"{name}.*range of float16")


@pytest.mark.usefixtures("no_compiler")
def test_head_of_another_target(pair, tmp_path):
    text = (pair[1] / "config.json").read_text()
    (pair[1] / "config.json").write_text(text.replace('"vocab_size": 512', '"vocab_size": 600'))
    refuse(config_for(pair, tmp_path), tmp_path, (PairError, CheckpointError), "600")


@pytest.mark.usefixtures("no_compiler")
def test_missing_tokenizer(pair, tmp_path):
    (pair[0] / "tokenizer.json").unlink()
    refuse(config_for(pair, tmp_path), tmp_path, CheckpointError, r"tokenizer\.json: file not found")


@pytest.mark.usefixtures("no_compiler")
def test_impossible_sizes(pair, tmp_path):
    refuse(config_for(pair, tmp_path, max_seq_len=4096), tmp_path, ConfigError, "max_seq_len: 4096")
    refuse(config_for(pair, tmp_path, tree=str(tmp_path / "no.json")), tmp_path, ConfigError, "no.json")


@pytest.mark.usefixtures("no_compiler")
def test_full_disk_is_seen_first(pair, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda _path: usage)
    refuse(config_for(pair, tmp_path), tmp_path, BuildError, "1 MiB free, about .* MiB are needed")


def test_failing_smoke_round_publishes_nothing(pair, tmp_path, monkeypatch):
    def crash(_folder, _inputs):
        raise BuildError("smoke round: no")

    monkeypatch.setattr(builder, "_compile_programs", lambda *_args: None)
    monkeypatch.setattr(builder, "_smoke", crash)
    refuse(config_for(pair, tmp_path), tmp_path, BuildError, "smoke round: no")


def test_engine_without_head(pair, tmp_path):
    lines = []
    config = make_config(
        flags={
            "model": str(pair[0]),
            "output": str(tmp_path / "engine"),
            "backend": "reference",
            "dtype": "fp32",
            "max_seq_len": 5,
            "max_batch_size": 1,
            "threads": 1,
        }
    )
    report = build(config, Progress(lines.append))
    assert report.config.tree == "off" and "smoke" in report.times
    assert any("target_step" in line for line in lines)
    engine = Engine.load(tmp_path / "engine")
    assert engine.manifest.head is None and not list((tmp_path / "engine").glob("programs/draft*"))
    assert engine.generate([3], SamplingParams(max_tokens=9)).completion_tokens == 4
    with pytest.raises(RequestError, match="draft head"):
        engine.generate([3], SamplingParams(speculation="chain-2"))
    sizes = json.loads((tmp_path / "engine" / "manifest.json").read_text())["config"]
    assert (sizes["max_tree_depth"], sizes["draft_topk"]) == (0, 0)
    assert torch.get_num_threads() == 1
