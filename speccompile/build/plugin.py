"""Compiles the CPU kernels (``plugins/cpu``) for this machine and loads them.

One library per (sources, flags, torch version, compiler, instruction set) is kept in the user's cache
folder, so a second build costs nothing; engines carry their own copy.  The kernels run on torch's
own threads and use its stable C ABI, so no OpenMP library and no second thread pool is involved.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import speccompile.ops  # noqa: F401  (the library implements operators that must exist first)
from speccompile.build import isa
from speccompile.errors import BuildError, EngineError
from speccompile.files import package_data, sha256

PLUGIN_NAME = "speccompile_cpu.so"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-Wno-psabi"),
)
_loaded: dict[str, Path] = {}


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """A compiled library; ``isa`` names the machine and CPU features it was compiled for."""

    path: Path
    isa: str
    compiler: str


def has_compiler() -> bool:
    """Whether :func:`build_cpu_plugin` and the ``torch`` lowering find a C++ compiler."""
    return any(map(shutil.which, _compiler_names()))


def _compiler_names() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen] if chosen else ["c++", "g++", "clang++"]


def _find_compiler() -> str:
    names = _compiler_names()
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    tried = f"CXX={names[0]}" if os.environ.get("CXX") else " or ".join(names)
    raise BuildError(f"no C++ compiler: {tried} not found on PATH; install g++ or set CXX to one")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "speccompile" / "plugins"


def _cache_key(sources: Path, compiler: str, macros: str) -> str:
    digest = hashlib.sha256()
    for part in (*_FLAGS, torch.__version__, compiler, macros):
        digest.update(part.encode() + b"\0")
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compile(compiler: str, sources: Path, target: Path) -> None:
    """Compile to a private name and rename, so that a reader never sees half a library."""
    torch_dir = Path(torch.__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / PLUGIN_NAME
        inputs = [f"-I{torch_dir / 'include'}", str(sources / "torch_binding.cpp")]
        link = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-o", str(output)]
        _run([compiler, *_FLAGS, *inputs, *link])
        output.replace(target)


def build_cpu_plugin(dest_dir: Path) -> PluginInfo:
    """Put the library for this machine into ``dest_dir``, compiling it if the cache has none.

    Raises :class:`BuildError` if there is no compiler or the compilation fails.
    """
    compiler, sources = _find_compiler(), package_data("plugins") / "cpu"
    macros = _run([compiler, "-march=native", "-E", "-dM", "-x", "c++", "/dev/null"])
    cached = _cache_dir() / _cache_key(sources, compiler, macros) / PLUGIN_NAME
    if not cached.exists():
        _compile(compiler, sources, cached)
    path = Path(dest_dir) / PLUGIN_NAME
    shutil.copyfile(cached, path)
    version = re.search(r'#define __VERSION__ "(.*)"', macros)
    return PluginInfo(
        path=path,
        isa=" ".join([isa.machine(), *isa.cpu_features()]),
        compiler=f"{Path(compiler).name} {version.group(1) if version else 'unknown'}",
    )


def load_plugin(path: Path) -> None:
    """Register the library's kernels for CPU tensors; a second copy of a loaded one is not loaded again.

    Raises :class:`EngineError` if the file cannot be loaded or a different build is already loaded.
    """
    if not path.is_file():
        raise EngineError(f"{path}: kernel library not found; build the engine again")
    digest = sha256(path)
    if digest in _loaded:
        return
    if _loaded:
        other = next(iter(_loaded.values()))
        raise EngineError(
            f"{path}: this process already runs other kernels ({other}); use one process per engine build"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise EngineError(
            f"{path}: cannot load kernel library ({error.__cause__ or error}); build the engine again"
        ) from error
    _loaded[digest] = path
