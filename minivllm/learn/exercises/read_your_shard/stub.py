"""Wrong numbers without an error: a rank reads the wrong shard.

The MLP of a transformer block, for one token x:

    y = down @ (silu(gate @ x) * (up @ x))        gate_up: [2 * I, H], gate on top of up;   down: [H, I]

With tensor parallelism each of W ranks computes its own I/W intermediate neurons and a part of y; an all-reduce adds the
parts up. So no rank needs the whole of any matrix. The function below reads a rank's share from the checkpoint.

Change it so that the sum is right and each rank reads only what it keeps.

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
    gate_up = file.get_tensor("gate_up")
    down = file.get_tensor("down")
    rows = gate_up.shape[0] // world_size
    columns = down.shape[1] // world_size
    return gate_up[rank * rows : (rank + 1) * rows], down[:, rank * columns : (rank + 1) * columns]
