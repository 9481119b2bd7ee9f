"""V1's proposals of a smaller model with the same vocabulary.

vLLM 0.25.1: vllm/v1/spec_decode/draft_model.py (DraftModelProposer), vllm/v1/spec_decode/llm_base_proposer.py
(SpecDecodeBaseProposer)
Articles: part 2 §2.3.6

V2's (worker/gpu/spec_decode/draft_model.py) reads and writes the states on the device, and its drafts stay there. Here
the inputs of each pass are put together on the CPU, and each draft comes back to it before the next pass.
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
from minivllm.sample.sampler import Sampler
from minivllm.worker.attn_metadata import AttentionMetadataBuilder
from minivllm.worker.gpu.attn_utils import get_kv_cache_spec, init_kv_cache
from minivllm.worker.gpu_input_batch import InputBatch

_LAYER_PREFIX = "draft_model."


class DraftModelProposer:
    """Runs a draft model as many times as it proposes tokens.

    The cache is as V2's: own layers, the target's blocks. So is the invariant: before a proposal it holds all tokens of
    a request but the last two, which therefore go into the first pass.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config = vllm_config.speculative_config
        assert config is not None and config.draft_model_config is not None
        model_config = config.draft_model_config
        assert model_config.max_model_len is not None
        self.num_speculative_tokens = config.num_speculative_tokens
        self.max_model_len = model_config.max_model_len
        self.vllm_config = config.make_draft_vllm_config(vllm_config)
        self.device = device
        self.dtype = DTYPES[model_config.dtype]
        self.builder = AttentionMetadataBuilder(
            model_config.get_num_kv_heads(vllm_config.parallel_config.tensor_parallel_size),
            vllm_config.cache_config.block_size,
            self.dtype,
            device,
        )
        self.model: CausalLM = get_model_loader().load_model(self.vllm_config, device)
        for layer in self.model.attention_layers():
            layer.layer_name = _LAYER_PREFIX + layer.layer_name

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Layer name → spec, under names that the target's layers do not have."""
        return get_kv_cache_spec(self.vllm_config, self.model)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> list[Tensor]:
        """Allocate the cache of those layers."""
        return init_kv_cache(kv_cache_config, self.model, self.dtype, self.device)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`[num_tokens]` each → hidden states; also how prompts get into the cache, with the target's inputs."""
        with set_forward_context(metadata):
            hidden_states = self.model.forward(input_ids, positions)
        assert isinstance(hidden_states, Tensor)
        return hidden_states

    def propose(self, batch: InputBatch, rows: np.ndarray, sampler: Sampler) -> np.ndarray:
        """`[n, num_speculative_tokens]` guesses how the given rows of the batch go on, `[n]`."""
        drafts = np.empty((len(rows), self.num_speculative_tokens), dtype=np.int64)
        metadata = batch.sampling_metadata.pick(rows.tolist())
        last = batch.num_tokens[rows] - 1
        both, positions = np.repeat(rows, 2), np.stack((last - 1, last), axis=1).ravel()
        hidden_states = self._decode(batch, both, batch.token_ids_cpu[both, positions], positions)[1::2]
        for step in range(self.num_speculative_tokens):
            if step:
                hidden_states = self._decode(batch, rows, drafts[:, step - 1], last + step)
            # Chosen as the target will, with the same noise, so that the two agree as often as they can.
            logits = self.model.compute_logits(hidden_states)
            position = torch.from_numpy(last + step + 1).to(self.device)
            drafts[:, step] = sampler.draw(logits, metadata, position).cpu().numpy()
        return drafts

    def _decode(
        self, batch: InputBatch, rows: np.ndarray, tokens: np.ndarray, positions: np.ndarray
    ) -> Tensor:
        """One pass over tokens at their positions, `[n]` each."""
        # A proposal may reach beyond the model's length; the scheduler cuts it off, and what such a position writes
        # is read by nobody.
        positions = np.minimum(positions, self.max_model_len - 1)
        blocks, offsets = batch.block_table.compute_slot_mapping(rows, positions)
        metadata = AttentionMetadata((self._upload(blocks), self._upload(offsets)))
        block_table = batch.block_table.gpu.index_select(0, self._upload(rows))
        self.builder.add_decodes(metadata, block_table, positions + 1)
        return self.forward(self._upload(tokens), self._upload(positions), metadata)

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
