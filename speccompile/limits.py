"""Sizes that programs are compiled for, shared by build and runtime, and the shape of a KV block."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.checkpoint.config import HeadConfig, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes the programs were made for.

    ``max_rows`` bounds the token rows of one call, all requests together; ``max_seq_len`` is in
    tokens, prompt included; ``draft_topk`` candidates per drafted row; ``block_size`` KV slots;
    ``min_target_rows`` the rows, and rows with logits, that ``target_step`` takes at least (padding
    rows belong to no request): a one-row matrix product runs another kernel, whose sums differ in the
    last bits; from two rows on, a row's result did not depend on the number of rows.
    """

    max_batch_size: int
    max_seq_len: int
    max_rows: int
    max_tree_depth: int
    draft_topk: int
    block_size: int
    min_target_rows: int = 2

    @property
    def max_path(self) -> int:
        """Longest accepted path P, root included."""
        return self.max_tree_depth + 1

    @property
    def mask_words(self) -> int:
        """Words W of a packed suffix mask; one request may fill a whole call."""
        return -(-self.max_rows // 64)

    @property
    def blocks_per_request(self) -> int:
        """Width M of a block table."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def rows_per_request(self) -> int:
        """Rows every one of ``max_batch_size`` requests can have in one call."""
        return self.max_rows // self.max_batch_size

    @property
    def default_num_blocks(self) -> int:
        """Blocks that let ``max_batch_size`` requests of full length run, plus the one never used."""
        return 1 + self.max_batch_size * self.blocks_per_request


BlockShapes = tuple[tuple[int, ...], tuple[int, ...]]


def kv_block_shapes(config: LlamaConfig | HeadConfig, block_size: int) -> BlockShapes:
    """One block of one layer: K [heads, head_dim, block] (transposed) and V [heads, block, head_dim]."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return (heads, dim, block_size), (heads, block_size, dim)
