"""Log-probabilities of the prompt's own tokens.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/prompt_logprob.py (PromptLogprobsWorker)
Articles: part 1 §8.2
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.sample.logprob import compute_topk_logprobs
from minivllm.worker.gpu.sample.output import LogprobsTensors
from minivllm.worker.gpu.states import RequestState

_NONE = -1
# Positions whose logits are computed at once: a long prompt's would take more memory than the model.
_CHUNK = 256


class PromptLogprobsWorker:
    """Collects them chunk by chunk and hands them out when the prompt is done.

    A request that is preempted before that starts again from nothing, so that none is handed out twice; one that is
    preempted later has had its own.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.num_prompt_logprobs = np.full(max_num_reqs, _NONE, dtype=np.int32)
        self.in_progress: dict[str, list[LogprobsTensors]] = {}

    def add_request(self, req_id: str, slot: int, params: SamplingParams, is_resumed: bool) -> None:
        """Args:
        is_resumed: the request comes back after a preemption and had finished its prompt.
        """
        self.num_prompt_logprobs[slot] = _NONE
        if params.prompt_logprobs is not None and not is_resumed:
            self.num_prompt_logprobs[slot] = params.prompt_logprobs
            self.in_progress[req_id] = []

    def remove_request(self, req_id: str) -> None:
        self.in_progress.pop(req_id, None)

    def compute_prompt_logprobs(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        batch: InputBatch,
        states: RequestState,
    ) -> dict[str, LogprobsTensors]:
        """Request → all rows of its prompt, for the requests whose prompt ends in this step.

        Row i is about prompt token i + 1; the first one has no predecessor that could predict it. To be called before
        the states advance.

        Args:
            hidden_states: `[num_tokens, hidden_size]`.
        """
        if not self.in_progress:
            return {}
        done: dict[str, LogprobsTensors] = {}
        for row in np.flatnonzero(self.num_prompt_logprobs[batch.idx_mapping_np] != _NONE).tolist():
            req_id, slot = batch.req_ids[row], int(batch.idx_mapping_np[row])
            if req_id not in self.in_progress:
                continue
            first, last = int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1])
            position = int(batch.seq_lens_np[row]) - (last - first)
            # The last token of the prompt predicts the first of the output, which is not our business.
            count = min(last - first, int(states.prompt_len.np[slot]) - 1 - position)
            targets = states.all_token_ids.gpu[slot, position + 1 : position + 1 + max(count, 0)].long()
            chunks = self.in_progress[req_id]
            for start in range(0, count, _CHUNK):
                end = min(start + _CHUNK, count)
                logits = compute_logits(hidden_states[first + start : first + end])
                wanted = int(self.num_prompt_logprobs[slot])
                chunks.append(compute_topk_logprobs(logits, wanted, targets[start:end]))
            if batch.is_sampled_np[row]:
                del self.in_progress[req_id]
                if chunks:
                    done[req_id] = LogprobsTensors(
                        torch.cat([c.token_ids for c in chunks]),
                        torch.cat([c.logprobs for c in chunks]),
                        torch.cat([c.ranks for c in chunks]),
                    )
        return done
