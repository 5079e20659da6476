"""Files that a run writes: whole or not at all, also when the machine stops or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from speccompile.errors import SpeccompileError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOW_BYTES = 2**20


class OutputError(SpeccompileError):
    """A run cannot write its folder, or cannot read back what it wrote there."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Calls ``write`` with a file that becomes ``path`` once its bytes are on disk.

    On any failure the old ``path`` stays as it is and the part written is removed.  Raises OutputError when
    the disk is full or the folder not writable.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as RuntimeError, without the reason
        failure = write_error(path, error)
        with contextlib.suppress(
            OSError
        ):  # the folder itself may be what is wrong; that error is raised below
            part.unlink(missing_ok=True)
        if failure is None:
            raise
        raise failure from error


def write_error(path: Path, error: Exception) -> OutputError | None:
    """The error for a failed write to ``path``; None for a RuntimeError that is not about the disk."""
    full = isinstance(error, OSError) and error.errno in _FULL
    if not full and path.parent.is_dir():
        full = shutil.disk_usage(path.parent).free < _LOW_BYTES
    if full:
        return OutputError(
            f"{path.parent}: disk full while writing {path.name}; the last checkpoint is intact: free space "
            f"there, then continue with --resume"
        )
    if isinstance(error, OSError):
        return OutputError(f"{path}: cannot be written ({error.strerror or error}); check the folder")
    return None


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
