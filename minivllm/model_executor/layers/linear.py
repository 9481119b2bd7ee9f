"""Linear layers whose weight is divided among the ranks of the tensor-parallel group.

vLLM 0.25.1: vllm/model_executor/layers/linear.py (ColumnParallelLinear, MergedColumnParallelLinear,
QKVParallelLinear, RowParallelLinear)
Articles: part 1 §8.2, part 2 §4.4

Column parallel: each rank computes some of the outputs from all inputs, nothing is exchanged. Row parallel: each
rank has some of the inputs, and the partial outputs are added over the ranks. One after the other they need a single
all-reduce.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.parallel_state import get_tp_group
from minivllm.model_executor.layers.layer import Layer, empty_parameter
from minivllm.model_executor.model_loader.weight_utils import WeightSlice


class ColumnParallelLinear(Layer):
    """Several linear maps of one input in one matrix, each divided by its outputs.

    Args:
        output_sizes: outputs of each map on all ranks together, by shard id.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: dict[str | int, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        tp = get_tp_group()
        self.tp_rank, self.tp_size = tp.rank_in_group, tp.world_size
        self.input_size = input_size
        self.output_sizes = output_sizes
        # shard id -> (first row here, rows here, first row in the checkpoint)
        self.shards: dict[str | int, tuple[int, int, int]] = {}
        rows = 0
        for shard_id, size in output_sizes.items():
            here, first = self.divide(shard_id, size)
            self.shards[shard_id] = (rows, here, first)
            rows += here
        self.weight = empty_parameter(rows, input_size, dtype=dtype, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if bias else None

    def divide(self, shard_id: str | int, size: int) -> tuple[int, int]:
        """Number of rows of a map that this rank keeps, and the first of them in the checkpoint."""
        here = size // self.tp_size
        return here, here * self.tp_rank

    def load_weight(self, name: str, weight: WeightSlice, shard_id: str | int | None) -> None:
        assert shard_id is not None
        size = self.output_sizes[shard_id]
        weight.expect_shape((size, self.input_size) if name == "weight" else (size,))
        start, rows, first = self.shards[shard_id]
        self.get_parameter(name)[start : start + rows].copy_(weight.read(0, first, rows))

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, input_size]` → `[num_tokens, this rank's rows]`."""
        return F.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Gate and up projection of an MLP."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(input_size, {0: output_size, 1: output_size}, bias, dtype, device)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projection.

    Key and value heads are replicated when there are fewer of them than ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head_dim = head_dim
        self.total_num_kv_heads = num_kv_heads
        kv_size = num_kv_heads * head_dim
        sizes: dict[str | int, int] = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}
        super().__init__(hidden_size, sizes, bias, dtype, device)

    def divide(self, shard_id: str | int, size: int) -> tuple[int, int]:
        if shard_id == "q" or self.total_num_kv_heads >= self.tp_size:
            return super().divide(shard_id, size)
        replicas = self.tp_size // self.total_num_kv_heads
        return self.head_dim, self.tp_rank // replicas * self.head_dim


class RowParallelLinear(Layer):
    """A linear map divided by its inputs; the partial outputs are added over the ranks."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        tp = get_tp_group()
        self.tp_rank = tp.rank_in_group
        self.input_size, self.output_size = input_size, output_size
        self.columns = input_size // tp.world_size
        self.all_reduce = tp.all_reduce
        self.reduce_results = tp.world_size > 1
        self.weight = empty_parameter(output_size, self.columns, dtype=dtype, device=device)
        self.bias = empty_parameter(output_size, dtype=dtype, device=device) if bias else None
        # Added on one rank only, before the sum over the ranks.
        self.adds_bias = tp.is_first_rank

    def load_weight(self, name: str, weight: WeightSlice, shard_id: str | int | None) -> None:
        if name == "bias":
            return super().load_weight(name, weight, shard_id)
        weight.expect_shape((self.output_size, self.input_size))
        self.weight.copy_(weight.read(1, self.columns * self.tp_rank, self.columns))
        return None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, this rank's columns]` → `[num_tokens, output_size]`, the same on all ranks."""
        y = F.linear(x, self.weight, self.bias if self.adds_bias else None)
        return self.all_reduce(y) if self.reduce_results else y
