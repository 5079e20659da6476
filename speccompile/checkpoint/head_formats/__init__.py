"""The EAGLE head formats we read.

Each module owns one :class:`~speccompile.checkpoint.head_formats.base.HeadFormat`; this one owns their order.
A new format is a new module and one entry here.
"""

from __future__ import annotations

from speccompile.checkpoint.head_formats.base import HeadFormat, RawHead
from speccompile.checkpoint.head_formats.modelopt import MODELOPT
from speccompile.checkpoint.head_formats.safeailab import SAFEAILAB_1, SAFEAILAB_3
from speccompile.checkpoint.head_formats.speculators import SPECULATORS, SPECULATORS_1

FORMATS: tuple[HeadFormat, ...] = (SPECULATORS, SPECULATORS_1, SAFEAILAB_1, SAFEAILAB_3, MODELOPT)


def recognise(raw: RawHead) -> HeadFormat:
    """The first format whose tensors match; :class:`CheckpointError` when none does."""
    for head_format in FORMATS:
        if head_format.matches(raw):
            return head_format
    raise raw.error(
        "not an EAGLE head in a known format; the tensors match none of " + ", ".join(f.name for f in FORMATS)
    )
