"""The ``torch`` backend: AOTInductor libraries with weights packed ahead of time.

``freezing`` lets Inductor constant-fold the weights into oneDNN's blocked layout at build time;
without it every call re-packs each weight, which costs more than the product itself.  A program is
stored as the shared library itself (weights inside, mapped on demand) and its operator table, not
as the ``.pt2`` archive that would have to be unpacked at every load.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from speccompile.build.lowering import Program
from speccompile.errors import BuildError, EngineError

_CONFIG = {"freezing": True}
_KEPT = (".so", ".json")  # the runner finds the operator table beside the library, by this suffix


def _unpack(package: Path, stem: Path) -> None:
    """Write the library and the operator table of ``package`` as ``stem.so`` and ``stem.json``."""
    with zipfile.ZipFile(package) as archive:
        for suffix in _KEPT:
            names = [name for name in archive.namelist() if name.endswith(f".wrapper{suffix}")]
            if len(names) != 1:
                raise BuildError(f"{stem.name}: this torch packs {len(names)} {suffix} files, expected one")
            info = archive.getinfo(names[0])
            info.filename = stem.with_suffix(suffix).name
            archive.extract(info, stem.parent)


class AotInductor:
    """Compiles with a C++ compiler, loads without one."""

    def compile(self, program: ExportedProgram, stem: Path) -> None:
        # The compiler takes seconds to import; loading an engine does not need it.
        import torch._inductor

        try:
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                package = Path(folder) / f"{stem.name}.pt2"
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(package), inductor_configs=_CONFIG
                )
                _unpack(package, stem)
        except (RuntimeError, torch._inductor.exc.InductorError) as error:
            raise BuildError(f"AOTInductor could not compile {stem.name}: {error}") from error

    def load(self, stem: Path) -> Program:
        library = stem.with_suffix(".so")
        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
        except RuntimeError as error:
            raise EngineError(f"{library}: the compiled program cannot be loaded: {error}") from error

        def run(*inputs: Any) -> tuple[Tensor, ...]:
            flat = [t for item in inputs for t in (item if isinstance(item, list) else (item,))]
            return tuple(runner.run(flat))

        return run


LOWERING = AotInductor()
