"""Which KV cache blocks belong to which request.

vLLM 0.25.1: vllm/v1/core/kv_cache_manager.py (KVCacheManager)
Articles: part 1 §8.3
"""

from __future__ import annotations

from minivllm.core.block_pool import BlockPool
from minivllm.core.request import Request

_NO_BLOCKS: list[int] = []


class KVCacheManager:
    """Grows and frees the block list of each request.

    Invariants:
        1. A request owns ceil(n / block_size) blocks, in order of position, where n is the most tokens that it had or
           looked ahead to; rejected drafts give none back, as the next ones will need them.
        2. allocate_slots either gives all blocks that the step needs or changes nothing.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int) -> None:
        self.block_pool = BlockPool(num_gpu_blocks)
        self.block_size = block_size
        self.req_to_blocks: dict[str, list[int]] = {}

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> list[int] | None:
        """Make room for the next `num_new_tokens` tokens of a request.

        Args:
            num_lookahead_tokens: more room behind them, for what a draft model writes when it proposes.

        Returns:
            The blocks added (often none, since a block holds several tokens), or None when the pool has too few.
        """
        blocks = self.req_to_blocks.get(request.request_id, _NO_BLOCKS)
        total = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        missing = -(-total // self.block_size) - len(blocks)
        if missing <= 0:
            return _NO_BLOCKS
        if missing > self.block_pool.get_num_free_blocks():
            return None
        new_blocks = self.block_pool.get_new_blocks(missing)
        if blocks:
            blocks.extend(new_blocks)
        else:
            self.req_to_blocks[request.request_id] = list(new_blocks)
        return new_blocks

    def get_block_ids(self, request_id: str) -> list[int]:
        """A copy: the scheduler's output must not change when the request grows."""
        return list(self.req_to_blocks.get(request_id, _NO_BLOCKS))

    def free(self, request: Request) -> None:
        """Give all blocks of a request back; nothing happens when it has none."""
        self.block_pool.free_blocks(self.req_to_blocks.pop(request.request_id, _NO_BLOCKS))

    def check_invariants(self) -> None:
        """Raises RuntimeError when a block is owned twice, lost, or the null block is in use."""
        owned = [block for blocks in self.req_to_blocks.values() for block in blocks]
        free = list(self.block_pool.free_block_queue)
        if sorted(owned + free) != list(range(1, self.block_pool.num_gpu_blocks)):
            raise RuntimeError(f"KV cache blocks are lost or owned twice: owned {owned}, free {free}")
