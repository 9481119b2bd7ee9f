"""Embedding and output head, divided among the ranks by vocabulary.

vLLM 0.25.1: vllm/model_executor/layers/vocab_parallel_embedding.py (VocabParallelEmbedding, ParallelLMHead)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.distributed.parallel_state import get_tp_group
from minivllm.model_executor.layers.layer import Layer, empty_parameter
from minivllm.model_executor.model_loader.weight_utils import WeightSlice


class VocabParallelEmbedding(Layer):
    """The rows of this rank's part of the vocabulary, and one row of zeros for all other tokens.

    With the zeros a lookup needs no mask: each rank looks up every token, and the sum over the ranks is the embedding.

    Attributes:
        head: `[rows, hidden_size]` the weight as an output head.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        tp = get_tp_group()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        # All ranks get the same number of rows, since all_gather joins logits of equal shape; the last ones are zero.
        self.rows = -(-vocab_size // tp.world_size)
        self.start = self.rows * tp.rank_in_group
        self.filled = max(0, min(self.rows, vocab_size - self.start))
        self.all_reduce = tp.all_reduce
        self.divided = tp.world_size > 1
        self.weight = empty_parameter(self.rows + 1, hidden_size, dtype=dtype, device=device)
        self.weight[self.filled :].zero_()
        row = torch.full((vocab_size,), self.rows, dtype=torch.int32)
        row[self.start : self.start + self.filled] = torch.arange(self.filled, dtype=torch.int32)
        self.row_of_token = row.to(device)

    def load_weight(self, name: str, weight: WeightSlice, shard_id: str | int | None) -> None:
        weight.expect_shape((self.vocab_size, self.hidden_size))
        self.weight[: self.filled].copy_(weight.read(0, self.start, self.filled))

    def process_weights_after_loading(self) -> None:
        self.head = self.weight.data[: self.rows]

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[num_tokens]` → `[num_tokens, hidden_size]`, the same on all ranks."""
        if not self.divided:
            return self.weight.index_select(0, input_ids)
        return self.all_reduce(self.weight.index_select(0, self.row_of_token.index_select(0, input_ids)))


class ParallelLMHead(VocabParallelEmbedding):
    """An output head of its own; with tied weights the embedding itself is the head."""
