"""The pool of KV blocks: who holds which block, and proof that none is lost.

Target and head caches have the same number of blocks and share one block table per request.  A
request gets every block it can ever need when it is admitted, so a running request never runs out.
Block 0 is never handed out: unused entries of a block table point at it.
"""

from __future__ import annotations

from speccompile.errors import ConfigError

NULL_BLOCK = 0


class BlockPool:
    """Free list over blocks 1 .. num_blocks-1 of ``block_size`` slots each."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._held: set[int] = set()

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, slots: int) -> int:
        """Blocks that hold ``slots`` slots."""
        return -(-slots // self.block_size)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks; the caller has checked :attr:`num_free`."""
        assert count <= len(self._free), "admission must check num_free first"
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that :meth:`take` handed out."""
        assert self._held.issuperset(blocks), "a block was returned twice or never taken"
        self._held.difference_update(blocks)
        self._free.extend(blocks)

    def check_idle(self) -> None:
        """Assert that every block is free exactly once; called whenever no request is active."""
        whole = not self._held and sorted(self._free) == list(range(1, self.num_blocks))
        assert whole, f"KV blocks lost or doubled: held {sorted(self._held)}, free {sorted(self._free)}"
