"""How an operator joins PyTorch: one schema, one plain reference, one shape twin.

The reference is registered under ``CompositeExplicitAutograd``, the lowest-priority key for real
tensors, so a compiled plugin that registers a kernel for ``CPU`` takes over as soon as it is loaded
and nothing else has to change.  Exported graphs name the operator, never the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "speccompile"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define ``speccompile::<name of schema>`` and return the callable operator."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.speccompile, name).default
