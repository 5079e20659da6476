"""Ahead-of-time compiled EAGLE speculative decoding for Llama models.

``speccompile.Engine`` and ``speccompile.SamplingParams`` are the Python API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccompile.runtime.engine import Engine as Engine
    from speccompile.runtime.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_LAZY = {"Engine": "speccompile.runtime.engine", "SamplingParams": "speccompile.runtime.params"}


def __getattr__(name: str) -> Any:
    """Imports the API on first use, so that the command line's help does not load torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
