"""Which blocks of the KV cache belong to which row of V1's persistent batch.

vLLM 0.25.1: vllm/v1/worker/block_table.py (BlockTable)
Articles: part 1 §7

In V2 (worker/gpu/block_table.py) a table belongs to a slot, which its request keeps, and only new entries are written
to the device. Here it belongs to a row: it moves when the row moves, and is copied to the device as a whole.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NULL_BLOCK = 0


class BlockTable:
    """`[max_num_reqs, max_blocks]` block ids by row and position; unused entries are the null block.

    Attributes:
        np: the table on the CPU, which is where it is kept.
        gpu: the device's copy, as of the last commit.
    """

    def __init__(self, block_size: int, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        shape = (max_num_reqs, self.max_blocks)
        self.cpu = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu: Tensor = self.cpu.to(device)
        self.num_blocks_per_row = np.zeros(max_num_reqs, dtype=np.int32)

    def append_row(self, block_ids: list[int], row: int) -> None:
        start = int(self.num_blocks_per_row[row])
        self.np[row, start : start + len(block_ids)] = block_ids
        self.num_blocks_per_row[row] += len(block_ids)

    def add_row(self, block_ids: list[int], row: int) -> None:
        self.clear_row(row)
        self.append_row(block_ids, row)

    def clear_row(self, row: int) -> None:
        # Attention reads as many entries of each row as the longest has; old ones may be another request's by now.
        self.np[row] = NULL_BLOCK
        self.num_blocks_per_row[row] = 0

    def move_row(self, source: int, target: int) -> None:
        self.np[target] = self.np[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]

    def swap_row(self, first: int, second: int) -> None:
        self.np[[first, second]] = self.np[[second, first]]
        self.num_blocks_per_row[[first, second]] = self.num_blocks_per_row[[second, first]]

    def commit(self, num_reqs: int) -> None:
        """Bring the rows in use to the device."""
        self.gpu[:num_reqs].copy_(self.cpu[:num_reqs], non_blocking=True)

    def compute_slot_mapping(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens' keys and values go: block, and offset in the block; all `[num_tokens]`."""
        return self.np[rows, positions // self.block_size], positions % self.block_size
