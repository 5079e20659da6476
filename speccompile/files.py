"""Files on disk: digests and sizes of files, and where the package keeps its own data.

``plugins/`` and ``build_configs/`` sit at the top of the repository; a wheel carries them inside the
package.  :func:`package_data` finds them in both cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from speccompile.errors import SpeccompileError

_CHUNK = 1 << 20
_UNITS = ("B", "KiB", "MiB", "GiB")


@dataclass(frozen=True)
class FileDigest:
    """A file's POSIX path relative to its folder, its size in bytes and its SHA-256 (hex)."""

    path: str
    size: int
    sha256: str


def sha256(path: Path) -> str:
    """SHA-256 of one file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def list_files(root: Path) -> list[Path]:
    """Every regular file below ``root`` (``root`` itself if it is a file), sorted."""
    return [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())


def digest_files(paths: Iterable[Path], base: Path, prefix: str = "") -> tuple[FileDigest, ...]:
    """Digests of files, named relative to ``base`` with ``prefix`` in front."""
    return tuple(
        FileDigest(prefix + path.relative_to(base).as_posix(), path.stat().st_size, sha256(path))
        for path in paths
    )


def size_text(size: float) -> str:
    """Bytes with a binary unit, such as ``1.5 MiB``."""
    exponent = 0
    while size >= 1024 and exponent < len(_UNITS) - 1:
        size, exponent = size / 1024, exponent + 1
    return f"{size:.1f} {_UNITS[exponent]}" if exponent and size < 10 else f"{size:.0f} {_UNITS[exponent]}"


def package_data(name: str) -> Path:
    """Folder ``plugins`` or ``build_configs``: inside an installed package, else beside it in the repository.

    Raises SpeccompileError when neither exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / f"_{name}", package.parent / name):
        if folder.is_dir():
            return folder
    raise SpeccompileError(f"{name}: not found beside or inside {package}; install speccompile again")
