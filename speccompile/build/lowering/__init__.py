"""Lowerings turn exported programs into files of an engine and back into callables.

A lowering knows nothing of models or scheduling.  Lowerings are found by name and imported only
when chosen, so a missing optional library fails with its install command and only then.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch.export import ExportedProgram

from speccompile.errors import ConfigError

Program = Callable[..., Any]
"""A loaded program: positional inputs as in the contract, KV as two lists; returns a tuple of tensors."""


class Lowering(Protocol):
    """What every backend implements."""

    def compile(self, program: ExportedProgram, stem: Path) -> None:
        """Compile one program into one or more files ``stem.*``; raises BuildError."""

    def load(self, stem: Path) -> Program:
        """Load what :meth:`compile` wrote; raises EngineError."""


_MODULES = {"torch": "aot_inductor", "reference": "reference"}


def lowering_names() -> tuple[str, ...]:
    """Names accepted by ``--backend``."""
    return tuple(_MODULES)


def get_lowering(name: str) -> Lowering:
    """The lowering called ``name``; an unknown name is a ConfigError that lists the known ones."""
    if name not in _MODULES:
        raise ConfigError(f"backend {name!r} is not known; choose one of: {', '.join(_MODULES)}")
    module = import_module(f"speccompile.build.lowering.{_MODULES[name]}")
    return module.LOWERING
