"""The ``reference`` backend: the exported program itself, run operator by operator.

Slow, needs no compiler, and shares no code generator with the others: the oracle of the tests.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.export import ExportedProgram

from speccompile.build.lowering import Program
from speccompile.errors import EngineError


class Reference:
    """Saves and reloads the exported graph with its weights."""

    def compile(self, program: ExportedProgram, stem: Path) -> None:
        # Through memory: torch aborts the process when its own file writer meets a full disk.
        archive = io.BytesIO()
        torch.export.save(program, archive)
        stem.with_suffix(".pt2").write_bytes(archive.getbuffer())

    def load(self, stem: Path) -> Program:
        path = stem.with_suffix(".pt2")
        try:
            module = torch.export.load(str(path)).module(check_guards=False)
        except (RuntimeError, ValueError, KeyError) as error:
            raise EngineError(f"{path}: the exported program cannot be loaded: {error}") from error
        return torch.no_grad()(module.forward)


LOWERING = Reference()
