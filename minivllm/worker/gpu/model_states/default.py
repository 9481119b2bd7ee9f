"""Decoders with full attention and plain positions.

vLLM 0.25.1: vllm/v1/worker/gpu/model_states/default.py (DefaultModelState)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import VllmConfig
from minivllm.model_executor.layers.attention import AttentionMetadata
from minivllm.worker.gpu.attn_utils import AttentionMetadataBuilder
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.model_states.interface import ModelState


class DefaultModelState(ModelState):
    """Token ids and positions go in, one kind of attention for all layers."""

    def __init__(self, vllm_config: VllmConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(vllm_config)
        self.attn_metadata_builder = AttentionMetadataBuilder(
            self.max_model_len,
            vllm_config.cache_config.block_size,
            self.model_config.get_num_kv_heads(vllm_config.parallel_config.tensor_parallel_size),
            dtype,
            device,
            1 + vllm_config.num_speculative_tokens,
        )

    def prepare_inputs(self, batch: InputBatch) -> dict[str, Tensor]:
        return {"input_ids": batch.input_ids, "positions": batch.positions}

    def prepare_attn(self, batch: InputBatch, block_tables: BlockTables) -> AttentionMetadata:
        return self.attn_metadata_builder.build(batch, block_tables)

    def prepare_decodes(
        self, slots: Tensor, positions: Tensor, longest: int, block_tables: BlockTables
    ) -> AttentionMetadata:
        return self.attn_metadata_builder.build_decodes(slots, positions, longest, block_tables)
