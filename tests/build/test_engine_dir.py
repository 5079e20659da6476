"""The engine directory: strict manifest, checks at load, atomic publication."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from speccompile.build import engine_dir, isa
from speccompile.build.config import make_config
from speccompile.build.engine_dir import load_engine_dir, publish
from speccompile.build.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    QuantizationReport,
    read_manifest,
)
from speccompile.contract import contract_to_json
from speccompile.errors import BuildError, EngineError
from speccompile.files import FileDigest, digest_files, list_files, package_data
from tests.build.test_config import tiny_head, tiny_target


def tiny_manifest(files=(), **changes) -> Manifest:
    config = make_config(flags={"model": "m", "draft": "d", "output": "o"})
    fields = {
        "format_version": FORMAT_VERSION,
        "contract": contract_to_json(),
        "config": config.resolve(tiny_target(), tiny_head()),
        "target": tiny_target(),
        "head": tiny_head(),
        "quantization": QuantizationReport(
            calibration="texts", positions=9, mean_kl=0.5, top1_agreement=0.75, kept=("head.fc.weight",)
        ),
        "sources": (),
        "files": tuple(files),
        "versions": {"torch": torch.__version__},
        "machine": isa.machine(),
        "cpu_features": isa.cpu_features(),
        "argv": ("speccompile", "build"),
        "git_sha": None,
        "created": "2026-01-01T00:00:00+00:00",
        "peak_memory": 1,
        "times": {"total": 1.0},
    }
    return Manifest(**{**fields, **changes})


def write_engine(folder: Path, mark: str = "one", **changes) -> None:
    (folder / "programs").mkdir(parents=True)
    (folder / "programs" / "a.pt2").write_bytes(mark.encode() * 400_000)
    (folder / "trees").mkdir()
    (folder / "trees" / "t.json").write_text(mark)
    tiny_manifest(digest_files(list_files(folder), folder), **changes).write(folder)


def mark_of(engine: Path) -> str:
    return (engine / "trees" / "t.json").read_text()


def no_remains(parent: Path) -> bool:
    return [p.name for p in parent.iterdir()] == ["engine"]


@pytest.fixture
def engine(tmp_path) -> Path:
    publish(tmp_path / "engine", write_engine)
    return tmp_path / "engine"


def test_round_trip(engine):
    loaded = load_engine_dir(engine, verify=True)
    assert loaded.manifest == dataclasses.replace(tiny_manifest(), files=loaded.manifest.files)
    assert [f.path for f in loaded.manifest.files] == ["programs/a.pt2", "trees/t.json"]
    assert loaded.program("a").with_suffix(".pt2").stat().st_size == loaded.manifest.files[0].size
    assert engine.stat().st_mode & 0o777 == 0o755


def edit(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "engine format 99"),
        ({"surprise": 1}, "unknown keys: surprise"),
        ({"times": ...}, "missing or unknown keys: times"),
        ({"peak_memory": 7}, "digest differs"),
    ],
)
def test_edited_manifest_is_refused(engine, changes, message):
    edit(engine / MANIFEST_NAME, **changes)
    with pytest.raises(EngineError, match=f"manifest.json: .*{message}"):
        load_engine_dir(engine)


def test_unreadable_manifest_is_refused(engine, tmp_path):
    (engine / MANIFEST_NAME).write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        read_manifest(engine)
    (engine / MANIFEST_NAME).unlink()
    with pytest.raises(EngineError, match="not an engine directory"):
        read_manifest(engine)
    with pytest.raises(EngineError, match="no such engine directory"):
        read_manifest(tmp_path / "absent")


@pytest.mark.parametrize("path", ["../evil", "/evil"])
def test_file_paths_stay_inside(tmp_path, path):
    tiny_manifest([FileDigest(path, 1, "0")]).write(tmp_path)
    with pytest.raises(EngineError, match="leaves the engine"):
        read_manifest(tmp_path)


def test_missing_truncated_and_edited_files_are_named(engine):
    program, tree = engine / "programs" / "a.pt2", engine / "trees" / "t.json"
    tree.write_text("two")
    with pytest.raises(EngineError, match=r"trees/t\.json: changed since"):
        load_engine_dir(engine)
    tree.write_text("one")
    data = bytearray(program.read_bytes())
    data[5] ^= 1
    program.write_bytes(data)
    load_engine_dir(engine)  # a large file's digest is only checked on request
    with pytest.raises(EngineError, match=r"programs/a\.pt2: changed since"):
        load_engine_dir(engine, verify=True)
    program.write_bytes(data[:-1])
    with pytest.raises(EngineError, match=r"programs/a\.pt2: 1199999 bytes instead of 1200000"):
        load_engine_dir(engine)
    program.unlink()
    with pytest.raises(EngineError, match=r"programs/a\.pt2: missing"):
        load_engine_dir(engine)


def test_surplus_file_fails_verification(engine):
    (engine / "extra").write_text("")
    load_engine_dir(engine)
    with pytest.raises(EngineError, match="extra: not part of the engine"):
        load_engine_dir(engine, verify=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu_features": ("avx9000",)}, "this CPU lacks avx9000"),
        ({"machine": "pdp11"}, "built for pdp11"),
        ({"versions": {"torch": "1.0.0"}}, "built with torch 1.0.0"),
        ({"contract": {"version": 0}}, "another program contract"),
    ],
)
def test_engine_for_elsewhere_is_refused(tmp_path, changes, message):
    publish(tmp_path / "engine", lambda folder: write_engine(folder, **changes))
    with pytest.raises(EngineError, match=message):
        load_engine_dir(tmp_path / "engine")


def test_publish_replaces_and_leaves_nothing_behind(engine, tmp_path):
    publish(engine, lambda folder: write_engine(folder, "two"))
    assert mark_of(engine) == "two"
    assert no_remains(tmp_path)


def test_publish_without_exchange(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_dir.ctypes, "CDLL", lambda *_a, **_k: object())
    publish(engine, lambda folder: write_engine(folder, "two"))
    assert mark_of(engine) == "two"
    assert no_remains(tmp_path)


def test_engine_set_aside_by_a_killed_exchange_comes_back(engine, tmp_path):
    engine.rename(tmp_path / ".engine.replaced")

    def fail(_folder):
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        publish(engine, fail)
    assert mark_of(engine) == "one"
    assert no_remains(tmp_path)


def test_failing_writer_keeps_the_old_engine(engine, tmp_path):
    def full(folder):
        write_engine(folder, "two")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BuildError, match="disk is full"):
        publish(engine, full)
    assert mark_of(engine) == "one"
    assert no_remains(tmp_path)


def test_only_an_engine_is_overwritten(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    publish(folder, write_engine)  # an empty folder is taken
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(BuildError, match="holds files but no engine"):
        publish(folder, write_engine)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(BuildError, match="a file is in the way"):
        publish(file, write_engine)


def test_symlinked_output_is_written_through(engine, tmp_path):
    (tmp_path / "link").symlink_to(engine)
    publish(tmp_path / "link", lambda folder: write_engine(folder, "two"))
    assert mark_of(engine) == "two"
    assert (tmp_path / "link").is_symlink()


_HANGING_BUILD = """
import sys, time
from pathlib import Path
from speccompile.build.engine_dir import publish
def writer(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
publish(Path(sys.argv[1]), writer)
"""


def test_killed_build_keeps_the_old_engine_and_is_cleaned_up(engine, tmp_path):
    root = Path(engine_dir.__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", _HANGING_BUILD, str(engine)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    publish(engine, lambda folder: write_engine(folder, "two"))  # a running build's folder is left alone
    assert len(list(tmp_path.glob(".engine.building-*"))) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.05)
    assert mark_of(engine) == "two"
    publish(engine, lambda folder: write_engine(folder, "three"))
    assert mark_of(engine) == "three"
    assert no_remains(tmp_path)


def test_package_data():
    assert (package_data("build_configs") / "smollm2_135m_eagle_bf16_cpu.yaml").is_file()
    assert package_data("plugins").is_dir()
