"""Compilation of the kernels: cache, errors, threads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.build import plugin as plugin_module
from speccompile.build.plugin import PLUGIN_NAME, PluginInfo, build_cpu_plugin, load_plugin
from speccompile.errors import BuildError, EngineError


def test_second_build_copies_from_the_cache(plugin: PluginInfo, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(plugin_module, "_compile", fail)
    again = build_cpu_plugin(tmp_path)
    assert again.path == tmp_path / PLUGIN_NAME
    assert again.path.read_bytes() == plugin.path.read_bytes()
    load_plugin(again.path)


def test_no_compiler_is_a_clear_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"CXX=no-such-compiler.*install g\+\+"):
        build_cpu_plugin(tmp_path)


def test_a_compiler_error_is_shown(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plugin_module, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(BuildError, match="no-such-flag"):
        build_cpu_plugin(tmp_path)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("plugin")
def test_missing_damaged_and_foreign_libraries_are_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(EngineError, match="not found"):
        load_plugin(tmp_path / "none.so")
    other = tmp_path / "other.so"
    other.write_text("not a library")
    with pytest.raises(EngineError, match="other kernels"):
        load_plugin(other)
    monkeypatch.setattr(plugin_module, "_loaded", {})
    with pytest.raises(EngineError, match="cannot load"):
        load_plugin(other)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_kernels_bring_no_second_openmp_runtime(plugin: PluginInfo) -> None:
    code = (
        "import sys, pathlib; from speccompile.build.plugin import load_plugin;"
        "load_plugin(pathlib.Path(sys.argv[1])); sys.stdout.write(open('/proc/self/maps').read())"
    )
    maps = subprocess.run(
        [sys.executable, "-c", code, str(plugin.path)], capture_output=True, text=True, check=True
    ).stdout
    runtimes = set(re.findall(r"\S*lib(?:g|i)?omp[^/\s]*\.so\S*", maps))
    assert PLUGIN_NAME in maps
    assert len(runtimes) == 1
