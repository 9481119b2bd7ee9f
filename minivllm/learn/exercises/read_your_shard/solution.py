"""A rank keeps the same neurons everywhere: its rows of gate, its rows of up, and its columns of down.

A merged matrix is several matrices on top of each other, and each of them is cut by itself. The same holds for q, k and
v in attention, where k and v have fewer heads than q.

vLLM 0.25.1: vllm/model_executor/layers/linear.py (MergedColumnParallelLinear, RowParallelLinear)
Articles: part 1 §8.2, part 2 §4.4
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def load_shard(file: Any, rank: int, world_size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """This rank's share of `gate_up`, [2 * I / W, H], and of `down`, [H, I / W].

    Args:
        file: an open safetensors file. `file.get_tensor(name)` reads a whole tensor; `file.get_slice(name)` reads
            only what it is indexed with, and has a `get_shape()`.
    """
    gate_up, down = file.get_slice("gate_up"), file.get_slice("down")
    neurons = gate_up.get_shape()[0] // 2
    first, last = rank * neurons // world_size, (rank + 1) * neurons // world_size
    gate = gate_up[first:last]
    up = gate_up[neurons + first : neurons + last]
    return np.concatenate([gate, up]), down[:, first:last]
