"""Which KV cache blocks are free.

vLLM 0.25.1: vllm/v1/core/block_pool.py (BlockPool)
Articles: part 1 §8.3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NULL_BLOCK_ID = 0


class BlockPool:
    """Hands out block ids and takes them back.

    Invariants:
        1. A block is either free or owned, never both, and never owned twice.
        2. The null block (id 0) is never handed out: workers send the writes of padding there.
        3. free + owned = num_gpu_blocks - 1, at any time.

    Deviation from vLLM: a block is a plain int and has one owner, since there is no prefix caching and so
    nothing is shared.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"{num_gpu_blocks} KV cache blocks are too few: block 0 is the null block")
        self.num_gpu_blocks = num_gpu_blocks
        self.free_block_queue: deque[int] = deque(range(1, num_gpu_blocks))
        # One flag per block keeps invariant 1 checkable in constant time.
        self._owned = bytearray(num_gpu_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_gpu_blocks - 1

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks, those free for longest first. Raises ValueError when there are too few."""
        if num_blocks > len(self.free_block_queue):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self.free_block_queue)} are free")
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._owned[block] = 1
        return blocks

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises RuntimeError for a block that nobody owns (invariant 1)."""
        for block in blocks:
            if not self._owned[block]:
                raise RuntimeError(f"KV cache block {block} is freed although nobody owns it")
            self._owned[block] = 0
            self.free_block_queue.append(block)
