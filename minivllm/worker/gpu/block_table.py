"""Which blocks of the KV cache belong to which slot.

vLLM 0.25.1: vllm/v1/worker/gpu/block_table.py (BlockTables)
Articles: part 1 §7, §8.3
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.worker.gpu.buffer_utils import StagedWriteTensor

NULL_BLOCK = 0


class BlockTables:
    """`[max_num_reqs, max_blocks]` block ids by slot and position; unused entries are the null block.

    Args:
        max_model_len: the longest request; max_blocks follows from it.

    Attributes:
        version: another one whenever blocks are added.
    """

    def __init__(self, block_size: int, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        # One row more than there are requests: a slot that owns the null block only, for rows that fill up a batch.
        self.padding_slot = max_num_reqs
        self.table = StagedWriteTensor((max_num_reqs + 1, self.max_blocks), torch.int64, device)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int32)
        self.version = 0

    def append_block_ids(self, slot: int, new_block_ids: list[int], overwrite: bool) -> None:
        """Add blocks to a slot, in place of those it has if `overwrite`. Visible after apply_staged_writes."""
        self.version += 1
        start = 0 if overwrite else int(self.num_blocks[slot])
        end = start + len(new_block_ids)
        # Attention over several rows reads as many entries of each as the longest row has. What a former owner of
        # the slot left there may by now belong to someone else; its values must not even be multiplied by zero,
        # since they may not be finite.
        stale = max(0, int(self.num_blocks[slot]) - end)
        self.table.stage_write(slot, start, new_block_ids + [NULL_BLOCK] * stale)
        self.num_blocks[slot] = end

    def apply_staged_writes(self) -> None:
        """Bring what append_block_ids wrote to the device."""
        self.table.apply_write()

    def gather_block_tables(self, idx_mapping: Tensor, num_blocks: int) -> Tensor:
        """The first `num_blocks` entries of the given slots, `[n, num_blocks]`."""
        return self.table.gpu.narrow(1, 0, num_blocks).index_select(0, idx_mapping)

    def compute_slot_mappings(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where the tokens' keys and values go: block, and offset in the block; all `[num_tokens]`."""
        block_index = positions.div(self.block_size, rounding_mode="floor")
        entry = torch.add(block_index, slots, alpha=self.max_blocks)
        offsets = torch.sub(positions, block_index, alpha=self.block_size)
        return self.table.flat.index_select(0, entry), offsets
