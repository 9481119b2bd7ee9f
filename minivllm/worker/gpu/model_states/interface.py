"""What may differ from one kind of model to another, behind one interface.

vLLM 0.25.1: vllm/v1/worker/gpu/model_states/interface.py (ModelState)
Articles: part 1 §7, §8.2

The runner is the same for all models. Whatever a model wants otherwise (more inputs, other positions, other attention
metadata) is an answer to one of these questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from minivllm.config import VllmConfig
from minivllm.model_executor.layers.attention import AttentionMetadata
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.input_batch import InputBatch


class ModelState(ABC):
    """Attributes:
    num_new_sampled_tokens_per_step: tokens that a decode step adds to a request, speculation aside.
    """

    num_new_sampled_tokens_per_step = 1

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.model_config is not None and vllm_config.model_config.max_model_len is not None
        self.model_config = vllm_config.model_config
        self.max_model_len = vllm_config.model_config.max_model_len

    @abstractmethod
    def prepare_inputs(self, batch: InputBatch) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward."""

    @abstractmethod
    def prepare_attn(self, batch: InputBatch, block_tables: BlockTables) -> AttentionMetadata:
        """The batch as this model's attention sees it."""

    @abstractmethod
    def prepare_decodes(
        self, slots: Tensor, positions: Tensor, longest: int, block_tables: BlockTables
    ) -> AttentionMetadata:
        """The same for `[n]` rows of one token, by operations on the device alone, so that a graph can record them.

        Args:
            longest: tokens of the longest request, or more.
        """
