"""The four programs of the contract as modules over the graphs.

Each ``forward`` takes the inputs of :mod:`speccompile.contract` in order; KV caches are two lists of
per-layer tensors that the operators update in place.  Legend as in ``ARCHITECTURE.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speccompile import ops
from speccompile.model.eagle import EagleHead
from speccompile.model.layers import Attend
from speccompile.model.llama import Llama


def paged_attend(
    layout: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    k_cache: list[Tensor],
    v_cache: list[Tensor],
    head_dim: int,
) -> Attend:
    """Attention over the paged cache; ``layout`` is mask, cu_rows, prefix_len, suffix_start, block_table."""
    mask, cu_rows, prefix_len, suffix_start, block_table = layout

    def attend(layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        k, v = k_cache[layer], v_cache[layer]
        ops.kv_append(k, v, k_THD, v_THD, cu_rows, prefix_len, suffix_start, block_table)
        return ops.tree_attention(
            q_THD, k, v, mask, cu_rows, prefix_len, suffix_start, block_table, head_dim**-0.5
        )

    return attend


class TargetStep(nn.Module):
    """Rows of prefill chunks, plain steps and trees through the target.

    ``with_hidden`` appends the post-norm hidden state to the features of ``aux_layers`` (for training data).
    """

    def __init__(self, target: Llama, aux_layers: tuple[int, ...], *, with_hidden: bool = False) -> None:
        super().__init__()
        self.target, self.aux_layers, self.with_hidden = target, aux_layers, with_hidden

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        mask: Tensor,
        cu_rows: Tensor,
        prefix_len: Tensor,
        suffix_start: Tensor,
        block_table: Tensor,
        logit_row: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        layout = (mask, cu_rows, prefix_len, suffix_start, block_table)
        attend = paged_attend(layout, k_cache, v_cache, self.target.config.head_dim)
        hidden, feature = self.target(token, position, attend, self.aux_layers)
        if self.with_hidden:
            feature = torch.cat((feature, hidden), dim=-1)
        return self.target.lm_head(hidden[logit_row]).float(), feature


class _Draft(nn.Module):
    """What both draft programs share: the head, its draft vocabulary and the candidate choice."""

    token_ids: Tensor

    def __init__(self, head: EagleHead, token_ids: Tensor, topk: int) -> None:
        super().__init__()
        self.head, self.topk = head, topk
        self.register_buffer("token_ids", token_ids)

    def candidates(self, scored: Tensor, position: Tensor, temperature: Tensor, seed: Tensor) -> Tensor:
        """Best ``K`` target ids per row; the drawn token of a pair at position i sits at i + 2."""
        logits = self.head.lm_head(scored).float()
        return ops.draft_topk(logits, self.token_ids, seed, position + 2, temperature, self.topk)


class DraftExtend(_Draft):
    """Pairs with true target features: prompts and the accepted path of the last round."""

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        mask: Tensor,
        cu_rows: Tensor,
        prefix_len: Tensor,
        suffix_start: Tensor,
        block_table: Tensor,
        feature: Tensor,
        feature_row: Tensor,
        out_row: Tensor,
        temperature: Tensor,
        seed: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        layout = (mask, cu_rows, prefix_len, suffix_start, block_table)
        attend = paged_attend(layout, k_cache, v_cache, self.head.config.head_dim)
        hidden = self.head.fuse(feature[feature_row])
        hidden, scored = self.head(token, hidden, position, attend)
        return hidden[out_row], self.candidates(scored[out_row], position[out_row], temperature, seed)


class DraftStep(_Draft):
    """One further depth of the tree: rows continue rows of the previous call."""

    def forward(
        self,
        position: Tensor,
        mask: Tensor,
        cu_rows: Tensor,
        prefix_len: Tensor,
        suffix_start: Tensor,
        block_table: Tensor,
        hidden: Tensor,
        topk: Tensor,
        parent_row: Tensor,
        rank: Tensor,
        temperature: Tensor,
        seed: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        layout = (mask, cu_rows, prefix_len, suffix_start, block_table)
        attend = paged_attend(layout, k_cache, v_cache, self.head.config.head_dim)
        token = topk[parent_row, rank]
        hidden, scored = self.head(token, hidden[parent_row], position, attend)
        return hidden, self.candidates(scored, position, temperature, seed)


class Accept(nn.Module):
    """Draw one token per row, walk the tree, compact the accepted path's KV."""

    def __init__(self, max_path: int) -> None:
        super().__init__()
        self.max_path = max_path

    def forward(
        self,
        logits: Tensor,
        token: Tensor,
        parent: Tensor,
        position: Tensor,
        cu_rows: Tensor,
        prefix_len: Tensor,
        block_table: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        row = torch.arange(token.shape[0], dtype=torch.int32, device=token.device)
        # Padding rows past cu_rows[R] borrow the last request's parameters; no path reaches them.
        request = torch.bucketize(row, cu_rows[1:], right=True).clamp(max=seed.shape[0] - 1)
        drawn = ops.draw_tokens(
            logits,
            seed[request],
            position + 1,
            temperature[request],
            top_k[request],
            top_p[request],
            min_p[request],
        )
        path, path_len = ops.walk_tree(drawn, token, parent, cu_rows, self.max_path)
        ops.kv_compact(k_cache, v_cache, path, path_len, cu_rows, prefix_len, block_table)
        return drawn, path, path_len
