"""The engine directory on disk: atomic publication and the checks made when it is loaded.

Layout: ``manifest.json``, ``programs/``, ``lib/``, ``tokenizer/``, ``trees/``; ``trees/table.json`` comes
later, from tuning (:mod:`speccompile.build.table_file`).  A build writes into a
hidden sibling ``.NAME.building-*`` and swaps it with the old engine in one system call, so a killed
build leaves the old engine, or nothing where there was none; the next build removes its remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from speccompile.build import isa
from speccompile.build.manifest import MANIFEST_NAME, Manifest, read_manifest
from speccompile.build.table_file import TABLE_PATH, read_table
from speccompile.contract import contract_to_json
from speccompile.errors import BuildError, EngineError
from speccompile.files import FileDigest, list_files, sha256
from speccompile.tree.table import TreeTable
from speccompile.tree.tree import Tree, tree_from_json

PROGRAMS, LIB, TOKENIZER, TREES = "programs", "lib", "tokenizer", "trees"
DEFAULT_TREE = "default.json"
_SMALL_FILE = 1 << 20  # files up to this size are digested at every load
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class EngineDir:
    """A checked engine directory."""

    path: Path
    manifest: Manifest

    def program(self, name: str) -> Path:
        """Stem of a compiled program's files; its lowering knows the suffixes."""
        return self.path / PROGRAMS / name

    @property
    def lib(self) -> Path:
        """Folder of the plugin library."""
        return self.path / LIB

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer files."""
        return self.path / TOKENIZER

    def tree(self) -> Tree:
        """The tree given to the build; used unless there is a table or a request asks for another."""
        return tree_from_json(json.loads((self.path / TREES / DEFAULT_TREE).read_text(encoding="utf-8")))

    def table(self) -> TreeTable | None:
        """The tuned table, if there is one.  Raises EngineError for a damaged or foreign one."""
        found = read_table(self.path, self.manifest)
        return found[0] if found else None


def publish(output: Path, writer: Callable[[Path], None]) -> None:
    """Let ``writer`` fill a new folder, then put it at ``output`` in one step.

    Raises BuildError when ``output`` is something else than an engine or an empty folder, and when the
    disk is full.  Whatever fails, ``output`` stays as it was.
    """
    output = output.resolve()
    _check_replaceable(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(output)
        with _new_folder(output) as folder:
            writer(folder)
            _sync(folder)
            _put_in_place(folder, output)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise BuildError(
                f"{output}: the disk is full; free some space and build again (nothing was lost)"
            ) from error
        raise BuildError(f"{output}: cannot be written ({error})") from error


def _check_replaceable(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise BuildError(f"{output}: a file is in the way; give another --output")
    if any(output.iterdir()) and not (output / MANIFEST_NAME).is_file():
        raise BuildError(
            f"{output}: holds files but no engine, so it is not overwritten; give another --output"
        )


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A locked empty folder beside ``output``, removed at the end (by then it holds what was replaced)."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(output), dir=output.parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.chmod(0o755)  # mkdtemp makes it private
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(output: Path) -> str:
    return f".{output.name}.building-"


def _aside(output: Path) -> Path:
    return output.with_name(f".{output.name}.replaced")


def _remove_stale(output: Path) -> None:
    """Remove folders of killed builds (nobody holds their lock); bring back an engine they had set aside."""
    if (aside := _aside(output)).exists():
        if output.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(output)
    for folder in output.parent.glob(glob.escape(_prefix(output)) + "*"):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # a build of the same engine is running
        else:
            shutil.rmtree(folder)
        finally:
            os.close(handle)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(folder: Path, output: Path) -> None:
    """Move ``folder`` to ``output``; an engine that was there ends up at ``folder``."""
    if output.exists() and any(output.iterdir()):
        _exchange(folder, output)
    else:
        folder.rename(output)
    parent = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders atomically (Linux ``renameat2``); elsewhere by two renames, undone if one fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        at_cwd, exchange = -100, 2
        if libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(second))
    aside = _aside(second)
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def load_engine_dir(path: Path, *, verify: bool = False) -> EngineDir:
    """Read an engine directory and check that it is whole and can run here.

    Always: format version, contract, CPU, torch version, sizes of all files, digests of small ones.
    With ``verify``: digests of all, and no surplus files.  Raises EngineError naming the file.
    """
    manifest = read_manifest(path)
    if manifest.contract != contract_to_json():
        raise EngineError(f"{path}: built for another program contract; build the engine again")
    _check_machine(path, manifest)
    for item in manifest.files:
        _check_file(path / item.path, item, digest=verify or item.size <= _SMALL_FILE)
    if verify:
        known = {item.path for item in manifest.files} | {MANIFEST_NAME, TABLE_PATH}
        for file in list_files(path):
            if file.relative_to(path).as_posix() not in known:
                raise EngineError(f"{file}: not part of the engine; remove it")
    return EngineDir(path=path, manifest=manifest)


def _check_machine(path: Path, manifest: Manifest) -> None:
    if manifest.machine != isa.machine():
        raise EngineError(f"{path}: built for {manifest.machine}, this is {isa.machine()}; build it here")
    if missing := isa.missing_features(manifest.cpu_features):
        raise EngineError(
            f"{path}: this CPU lacks {', '.join(missing)}, which the engine uses; build it here"
        )
    built, here = manifest.versions.get("torch", ""), torch.__version__
    if built.split(".")[:2] != here.split(".")[:2]:
        raise EngineError(f"{path}: built with torch {built}, this is torch {here}; build the engine again")


def _check_file(path: Path, item: FileDigest, *, digest: bool) -> None:
    try:
        size = path.stat().st_size
        if size != item.size:
            raise EngineError(f"{path}: {size} bytes instead of {item.size}; build the engine again")
        if digest and sha256(path) != item.sha256:
            raise EngineError(f"{path}: changed since it was built (digest differs); build the engine again")
    except FileNotFoundError as error:
        raise EngineError(f"{path}: missing; build the engine again") from error
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error})") from error
