"""Let a grammar decide which tokens may be chosen.

vLLM 0.25.1: vllm/v1/worker/gpu/structured_outputs.py (StructuredOutputsWorker)
Articles: part 2 §2.3.5
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm import tracing
from minivllm.core.sched.output import GrammarOutput
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch


class StructuredOutputsWorker:
    """Applies the bitmasks that the engine's grammars compute while the model runs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.bits = torch.arange(32, dtype=torch.int32, device=device)

    def apply_grammar_bitmask(self, logits: Tensor, batch: InputBatch, grammar_output: GrammarOutput) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: `[num_logits, vocab_size]`.
        """
        row_of = {req_id: row for row, req_id in enumerate(batch.req_ids)}
        ids = grammar_output.structured_output_request_ids
        with tracing.span("runner.apply_grammar", requests=len(ids)) as s:
            rows = torch.tensor(self._logits_rows(batch, [row_of[req_id] for req_id in ids])).to(self.device)
            mask = async_copy_to_gpu(grammar_output.grammar_bitmask, self.device)
            allowed = ((mask.unsqueeze(-1) >> self.bits) & 1).flatten(1)[:, : self.vocab_size].bool()
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, float("-inf")))
            if tracing.calls:
                s.set(allowed=int(allowed.sum()))

    @staticmethod
    def _logits_rows(batch: InputBatch, rows: list[int]) -> list[int]:
        """Rows of the logits that belong to rows of the batch, those after drafts included."""
        num_drafts = batch.num_draft_tokens_np
        if num_drafts is None:
            return rows
        ends = (num_drafts + 1).cumsum()
        return [i for row in rows for i in range(int(ends[row] - num_drafts[row]) - 1, int(ends[row]))]
