"""What the runner knows about each request, in slots that never move.

vLLM 0.25.1: vllm/v1/worker/gpu/states.py (RequestState)
Articles: part 1 §7, §8.1

A request keeps its slot from its first step to its last. A batch names the slots it consists of (idx_mapping), in an
order of its own; nothing is compacted when a request ends, and nothing is copied when the order changes.
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor


class RequestState:
    """The slots.

    Attributes:
        all_token_ids: `[max_num_reqs, max_model_len + 1 + num_speculative_tokens]` prompt, output, and behind them what is
            proposed to come next; one column takes the token that is sampled when the model's length is reached.
        prompt_len: tokens of the user's prompt.
        prefill_len: tokens to compute before the next one can be sampled; more than prompt_len after a preemption.
        num_computed_tokens: tokens whose keys and values are in the cache; advanced on the device after each step.
        num_computed_tokens_np: the scheduler's view of it, which may run ahead of the device, and takes drafts in flight
            for accepted: an upper bound. It is exact while a request computes its prompt.
        last_sampled_tokens: `[max_num_reqs]` the next input of a request that decodes.
        version: another one whenever a request takes or leaves a slot.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, device: torch.device, num_speculative_tokens: int = 0
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.version = 0
        self.req_id_to_index: dict[str, int] = {}
        # Popped from the end: low slots first.
        self.free_indices = list(range(max_num_reqs - 1, -1, -1))
        # Deviation from vLLM: in the device's memory. There it is pinned memory of the host that the device reads and
        # writes (UVA), since for many long requests it is several gigabytes.
        self.all_token_ids = StagedWriteTensor(
            (max_num_reqs, max_model_len + 1 + num_speculative_tokens), torch.int32, device
        )
        self.prompt_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.prefill_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.num_computed_tokens = StagedWriteTensor(max_num_reqs, torch.int64, device)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int64)
        self.last_sampled_tokens = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def add_request(
        self, req_id: str, prompt_len: int, prefill_token_ids: list[int], num_computed_tokens: int
    ) -> int:
        """Take a free slot, which is returned. Visible on the device after apply_staged_writes."""
        if not self.free_indices:
            raise RuntimeError(f"no slot for request {req_id}: all {self.max_num_reqs} are taken")
        self.version += 1
        slot = self.free_indices.pop()
        self.req_id_to_index[req_id] = slot
        self.prompt_len.np[slot] = prompt_len
        self.prefill_len.np[slot] = len(prefill_token_ids)
        self.all_token_ids.stage_write(slot, 0, prefill_token_ids)
        self.num_computed_tokens.stage_write_elem(slot, num_computed_tokens)
        self.num_computed_tokens_np[slot] = num_computed_tokens
        return slot

    def apply_staged_writes(self) -> None:
        """Bring what add_request wrote to the device."""
        self.prompt_len.copy_to_uva()
        self.prefill_len.copy_to_uva()
        self.all_token_ids.apply_write()
        self.num_computed_tokens.apply_write()

    def remove_request(self, req_id: str) -> int | None:
        """Free the slot of a request and return it; None when the request has none."""
        slot = self.req_id_to_index.pop(req_id, None)
        if slot is not None:
            self.version += 1
            self.free_indices.append(slot)
        return slot
