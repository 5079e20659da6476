"""Slot arithmetic of the paged KV cache, shared by the references.

Slot i of a request lives in block ``block_table[i // block_size]`` at offset ``i % block_size``.
"""

from __future__ import annotations

from torch import Tensor

WORD_BITS = 64


def locate(slot_L: Tensor, block_table_M: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Cache block and in-block offset (both i64 [L]) of the slots of one request."""
    return block_table_M[slot_L // block_size].long(), slot_L % block_size
