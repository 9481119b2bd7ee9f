"""What the runner needs of whoever proposes tokens.

vLLM 0.25.1: vllm/v1/worker/gpu/spec_decode/speculator.py (BaseSpeculator)
Articles: part 2 §2.3.6
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from minivllm import tracing
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.outputs import DraftTokenIds
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch, put_draft_tokens
from minivllm.worker.gpu.sample.output import SamplerOutput
from minivllm.worker.gpu.states import RequestState


class Speculator(ABC):
    """Proposes after each step what the next one verifies.

    Attributes:
        num_speculative_tokens: proposed per request, at most.
    """

    method: str

    def __init__(self, num_speculative_tokens: int, req_states: RequestState) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.req_states = req_states
        self._proposed: tuple[InputBatch, Tensor, Tensor | None] | None = None

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Layers of its own, under names that the target's layers do not have."""
        return {}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> list[Tensor]:
        """Allocate the cache of those layers; the blocks are the target's, by the same numbers."""
        return []

    @abstractmethod
    def propose(self, batch: InputBatch) -> tuple[Tensor, Tensor | None]:
        """Guess how the requests of a step go on; the states have advanced already.

        Returns:
            Tokens `[num_reqs, num_speculative_tokens]`, and how many of each row count, `[num_reqs]` (None: all).
            Rows whose prompt is not done yet mean nothing.
        """

    @torch.inference_mode()
    def run(self, batch: InputBatch, sampler_output: SamplerOutput) -> Tensor:
        """Propose, and put the drafts where the next step verifies them.

        Returns:
            `[num_reqs, num_speculative_tokens]`; a row with fewer is filled up, since any token is as good a guess.
        """
        if not tracing.calls:
            return self._run(batch)[0]
        with tracing.span("runner.propose_draft", method=self.method) as s:
            tokens, counts = self._run(batch)
            sampled = torch.from_numpy(batch.is_sampled_np).to(tokens.device)
            each = torch.full_like(sampled, tokens.shape[1], dtype=torch.int64) if counts is None else counts
            verified = 0 if batch.num_draft_tokens_np is None else int(batch.num_draft_tokens_np.sum())
            rejected = 0 if sampler_output.num_rejected is None else int(sampler_output.num_rejected.sum())
            s.set(proposed=int((each * sampled).sum()), verified=verified, accepted=verified - rejected)
        return tokens

    def _run(self, batch: InputBatch) -> tuple[Tensor, Tensor | None]:
        tokens, counts = self.propose(batch)
        self._proposed = batch, tokens, counts
        slots, rows_np = batch.idx_mapping, np.flatnonzero(batch.is_sampled_np)
        drafts = tokens
        if len(rows_np) < batch.num_reqs:
            # Behind the others stands the rest of their prompt.
            rows = async_copy_to_gpu(rows_np, slots.device)
            slots, drafts = slots.index_select(0, rows), tokens.index_select(0, rows)
        seq_lens = self.req_states.num_computed_tokens.gpu.index_select(0, slots)
        put_draft_tokens(slots, seq_lens, self.req_states, drafts)
        return tokens, counts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the last step led to; None when there was none since the last call."""
        if self._proposed is None:
            return None
        batch, tokens, counts = self._proposed
        self._proposed = None
        rows = tokens.tolist()
        if counts is not None:
            rows = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
        drafts = [row if sampled else [] for row, sampled in zip(rows, batch.is_sampled_np, strict=True)]
        return DraftTokenIds(batch.req_ids, drafts)
