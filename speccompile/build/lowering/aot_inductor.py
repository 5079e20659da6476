"""The ``torch`` backend: AOTInductor packages with weights packed ahead of time.

``freezing`` lets Inductor constant-fold the weights into oneDNN's blocked layout at build time;
without it every call re-packs each weight, which costs more than the product itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch._inductor
from torch.export import ExportedProgram

from speccompile.build.lowering import Program
from speccompile.errors import BuildError, EngineError

_CONFIG = {"freezing": True}


class AotInductor:
    """Compiles with a C++ compiler, loads without one."""

    def compile(self, program: ExportedProgram, path: Path) -> None:
        try:
            with torch.no_grad():
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs=_CONFIG
                )
        except (RuntimeError, torch._inductor.exc.InductorError) as error:
            raise BuildError(f"AOTInductor could not compile {path.stem}: {error}") from error

    def load(self, path: Path) -> Program:
        try:
            return torch._inductor.aoti_load_package(str(path))
        except RuntimeError as error:
            raise EngineError(f"{path}: the compiled program cannot be loaded: {error}") from error


LOWERING = AotInductor()
