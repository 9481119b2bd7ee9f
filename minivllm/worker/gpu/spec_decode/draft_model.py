"""Proposals of a smaller model with the same vocabulary.

vLLM 0.25.1: vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py (AutoRegressiveSpeculator),
vllm/v1/spec_decode/draft_model.py (DraftModelProposer)
Articles: part 2 §2.3.6
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.config import VllmConfig
from minivllm.forward_context import set_forward_context
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.model_executor.layers.attention import AttentionMetadata
from minivllm.model_executor.model_loader import get_model_loader
from minivllm.model_executor.model_loader.default_loader import DTYPES
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.worker.gpu.attn_utils import AttentionMetadataBuilder, get_kv_cache_spec, init_kv_cache
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.sample.gumbel import greedy_sample
from minivllm.worker.gpu.sample.states import SamplingStates
from minivllm.worker.gpu.spec_decode.speculator import Speculator
from minivllm.worker.gpu.states import RequestState

_LAYER_PREFIX = "draft_model."


class DraftModelSpeculator(Speculator):
    """Runs a draft model as many times as it proposes tokens.

    Its keys and values lie in a cache of its own, at the places where the target's lie in theirs, so that the
    scheduler's blocks serve both. It is on the last pipeline stage only, and whole; the stage's ranks divide it as they
    divide the target.

    Invariant: before a proposal the draft model's cache holds all tokens of a request but the last two. Prompts are
    computed beside the target's; proposing d1 to dk writes the token before d1, then d1 to d(k-1). When all are
    accepted, dk is missing: hence two tokens go into the first pass.
    """

    method = "draft_model"

    def __init__(
        self,
        vllm_config: VllmConfig,
        req_states: RequestState,
        sampling_states: SamplingStates,
        device: torch.device,
    ) -> None:
        config = vllm_config.speculative_config
        assert config is not None and config.draft_model_config is not None
        super().__init__(config.num_speculative_tokens, req_states)
        model_config = config.draft_model_config
        self.vllm_config = config.make_draft_vllm_config(vllm_config)
        self.sampling_states = sampling_states
        self.device = device
        self.dtype = DTYPES[model_config.dtype]
        self.max_model_len = req_states.max_model_len
        self.attn_metadata_builder = AttentionMetadataBuilder(
            self.max_model_len,
            vllm_config.cache_config.block_size,
            model_config.get_num_kv_heads(vllm_config.parallel_config.tensor_parallel_size),
            self.dtype,
            device,
            # The target's batches, drafts included, are what prompts are computed by.
            1 + self.num_speculative_tokens,
        )
        self.model: CausalLM = get_model_loader().load_model(self.vllm_config, device)
        for layer in self.model.attention_layers():
            layer.layer_name = _LAYER_PREFIX + layer.layer_name

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        return get_kv_cache_spec(self.vllm_config, self.model)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> list[Tensor]:
        self.block_tables = block_tables
        return init_kv_cache(kv_cache_config, self.model, self.dtype, self.device)

    def propose(self, batch: InputBatch) -> tuple[Tensor, None]:
        states = self.req_states
        slots_np = batch.idx_mapping_np
        starts_np = batch.seq_lens_np - batch.num_scheduled_tokens
        if (starts_np < states.prefill_len.np[slots_np]).any():
            self._forward(
                batch.input_ids, batch.positions, self.attn_metadata_builder.build(batch, self.block_tables)
            )
        drafts = torch.zeros(
            (batch.num_reqs, self.num_speculative_tokens), dtype=torch.int64, device=self.device
        )
        rows_np = np.flatnonzero(batch.is_sampled_np)
        if not len(rows_np):
            return drafts, None
        rows = async_copy_to_gpu(rows_np, self.device)
        slots, slots_np = batch.idx_mapping.index_select(0, rows), slots_np[rows_np]
        last = states.num_computed_tokens.gpu.index_select(0, slots)
        # What the scheduler thinks, which is the most it can be: the device may have rejected some drafts.
        longest = int(batch.seq_lens_np[rows_np].max()) + 1

        positions = torch.stack((last - 1, last), dim=1).view(-1)
        both = slots.repeat_interleave(2)
        entry = torch.add(positions, both, alpha=states.all_token_ids.row_size)
        tokens = states.all_token_ids.flat.index_select(0, entry).long()
        hidden_states = self._decode(tokens, both, positions, longest)[1::2]
        for step in range(self.num_speculative_tokens):
            if step:
                hidden_states = self._decode(tokens, slots, last + step, longest + step)
            tokens = self._sample(hidden_states, slots, slots_np, last + step + 1)
            drafts[:, step].index_copy_(0, rows, tokens)
        return drafts, None

    def _decode(self, tokens: Tensor, slots: Tensor, positions: Tensor, longest: int) -> Tensor:
        """One pass over `[n]` tokens at their positions; `longest` tokens are in the cache of any row after it."""
        # A proposal may reach beyond the model's length; the scheduler cuts it off, and what such a position writes
        # is read by nobody.
        positions = positions.clamp(max=self.max_model_len - 1)
        longest = min(longest, self.max_model_len)
        metadata = self.attn_metadata_builder.build_decodes(slots, positions, longest, self.block_tables)
        return self._forward(tokens, positions, metadata)

    def _forward(self, tokens: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        with set_forward_context(metadata):
            hidden_states = self.model.forward(tokens, positions)
        assert isinstance(hidden_states, Tensor)
        return hidden_states

    def _sample(
        self, hidden_states: Tensor, slots: Tensor, slots_np: np.ndarray, positions: Tensor
    ) -> Tensor:
        """Choose as the target will, with the same noise, so that the two agree as often as they can."""
        logits = self.model.compute_logits(hidden_states)
        if self.sampling_states.temperature.np[slots_np].any():
            return self.sampling_states.sample(logits, slots, slots_np, positions)
        return greedy_sample(logits)
