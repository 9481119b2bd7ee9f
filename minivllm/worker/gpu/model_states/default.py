"""Decoders with full attention and plain positions.

vLLM 0.25.1: vllm/v1/worker/gpu/model_states/default.py (DefaultModelState)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config import VllmConfig
from minivllm.model_executor.layers.attention import AttentionMetadata
from minivllm.worker.gpu.attn_utils import build_attn_metadata
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.model_states.interface import ModelState


class DefaultModelState(ModelState):
    """Attributes:
    arange: `[max_model_len]` 0, 1, 2 …
    """

    def __init__(self, vllm_config: VllmConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(vllm_config, dtype, device)
        self.arange = torch.arange(self.max_model_len, device=device)

    def prepare_inputs(self, batch: InputBatch) -> dict[str, Tensor]:
        return {"input_ids": batch.input_ids, "positions": batch.positions}

    def prepare_attn(self, batch: InputBatch, block_tables: BlockTables) -> AttentionMetadata:
        return build_attn_metadata(batch, block_tables, self.arange, self.dtype)
