"""Instruction-set features of this CPU, as an engine records and checks them.

Programs and plugin are compiled for the building machine's CPU; loading them on a CPU without one of
its features would end in an illegal instruction, so the manifest stores the features and
:func:`missing_features` is asked before anything is loaded.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from pathlib import Path

# Prefixes of the flags that a native build may use.
_X86 = (
    "sse",
    "ssse",
    "avx",
    "fma",
    "f16c",
    "bmi",
    "amx",
    "popcnt",
    "abm",
    "movbe",
    "gfni",
    "vaes",
    "vpclmulqdq",
)
_ARM = ("asimd", "sve", "bf16", "i8mm", "fphp", "atomics")


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Sorted vector features of this CPU; empty where the system does not list them (no /proc/cpuinfo)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(
                sorted({f for f in flags.split() if f.startswith(_X86 if key.strip() == "flags" else _ARM)})
            )
    return ()


def machine() -> str:
    """Machine architecture, such as ``x86_64``."""
    return platform.machine()


def missing_features(needed: Iterable[str]) -> list[str]:
    """Features in ``needed`` that this CPU does not have."""
    return sorted(set(needed) - set(cpu_features()))


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_features()))
