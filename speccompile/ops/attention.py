"""``tree_attention``: attention of ragged rows over a paged prefix and the visible part of a suffix.

Legend: T rows, R requests, W mask words, Hq query heads, H kv heads, D head width, M blocks per request.
``q`` [T, Hq, D]; caches as in :mod:`speccompile.ops.cache_append`, already holding the rows of this
call; ``mask`` i64 [T, W]; returns [T, Hq, D] of q's dtype (zero for padding rows past ``cu_rows[R]``).
A row attends to all ``prefix_len`` slots of its request, then, in slot order, to the suffix slots
``prefix_len + s`` whose mask bit s is set.  Bits past the last written suffix slot are ignored.

The result of a row depends on its logical key sequence alone, bit for bit: not on how that sequence
is split into prefix and suffix, nor on the other rows of the call, nor on the number of threads.
Tree verification then equals plain decoding exactly.  Every kernel must keep this property.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speccompile.ops.paging import WORD_BITS, locate
from speccompile.ops.registry import register

SCHEMA = (
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor mask, Tensor cu_rows, "
    "Tensor prefix_len, Tensor suffix_start, Tensor block_table, float scale) -> Tensor"
)


def _visible_slots(mask_W: Tensor, prefix_len: int, suffix_len: int) -> Tensor:
    """Slots a row attends to, in logical order, i64 [L]."""
    bit_S = torch.arange(min(suffix_len, mask_W.numel() * WORD_BITS), device=mask_W.device)
    seen_S = (mask_W[bit_S // WORD_BITS] >> (bit_S % WORD_BITS)) & 1
    return torch.cat([torch.arange(prefix_len, device=mask_W.device), prefix_len + bit_S[seen_S.bool()]])


def _attend(q_QD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
    """One row in float32: softmax(q k / sqrt) v with grouped heads, [Hq, D]."""
    heads = k_LHD.shape[1]
    q_HGD = q_QD.float().view(heads, -1, q_QD.shape[-1])
    score_HGL = torch.einsum("hgd,lhd->hgl", q_HGD, k_LHD.float()) * scale
    out_HGD = torch.einsum("hgl,lhd->hgd", score_HGL.softmax(-1), v_LHD.float())
    return out_HGD.reshape(q_QD.shape).to(q_QD.dtype)


def reference(
    q_TQD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mask_TW: Tensor,
    cu_rows_R1: Tensor,
    prefix_len_R: Tensor,
    suffix_start_R: Tensor,
    block_table_RM: Tensor,
    scale: float,
) -> Tensor:
    out_TQD = torch.zeros_like(q_TQD, memory_format=torch.contiguous_format)
    cu = cu_rows_R1.tolist()
    prefix_len, suffix_start = prefix_len_R.tolist(), suffix_start_R.tolist()
    for r in range(len(prefix_len)):
        suffix_len = suffix_start[r] + cu[r + 1] - cu[r]
        for t in range(cu[r], cu[r + 1]):
            slot_L = _visible_slots(mask_TW[t], prefix_len[r], suffix_len)
            block_L, offset_L = locate(slot_L, block_table_RM[r], v_cache.shape[2])
            k_LHD, v_LHD = k_cache[block_L, :, :, offset_L], v_cache[block_L, :, offset_L, :]
            out_TQD[t] = _attend(q_TQD[t], k_LHD, v_LHD, scale)
    return out_TQD


def fake(q_TQD: Tensor, *_: Tensor | float) -> Tensor:
    return torch.empty_like(q_TQD, memory_format=torch.contiguous_format)


tree_attention = register(SCHEMA, reference, fake)
