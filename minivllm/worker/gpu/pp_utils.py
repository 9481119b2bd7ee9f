"""Sampled tokens on their way back from the last pipeline stage.

vLLM 0.25.1: vllm/v1/worker/gpu/pp_utils.py (PPHandler)
Articles: part 1 §7, §8.1

Only the last stage samples, but every stage keeps the tokens of its requests on its device, as inputs of their next
steps. A stage that waited for the tokens of each batch right after computing it would stand still until all later
stages are done. So receiving is divided: it is announced at the end of a step and finished when a step needs a token.

With speculation a row is more than a token: how many drafts were rejected, and what is proposed next. Both happen on the
last stage only, and the others need it in order to have the same inputs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm import tracing
from minivllm.distributed.parallel_state import GroupCoordinator, Transfer
from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.input_batch import InputBatch, post_update_tokens, put_draft_tokens
from minivllm.worker.gpu.sample.output import SamplerOutput
from minivllm.worker.gpu.states import RequestState


@dataclass(slots=True)
class PendingRecv:
    """The tokens of one batch that are under way.

    Attributes:
        number: counts the batches whose tokens are received.
        message: as PPHandler.broadcast sends it; valid after transfer.wait().
        seq_lens: `[num_reqs]` position of each token if all drafts stand; a copy, since the batch's own is overwritten
            by the next one.
        rows_np: rows that were sampled.
        generations_np: `[num_reqs]` of the slots, when the batch was computed.
    """

    number: int
    transfer: Transfer | None
    message: Tensor
    seq_lens: Tensor
    slots_np: np.ndarray
    rows_np: np.ndarray
    generations_np: np.ndarray


class PPHandler:
    """Sends the tokens on the last stage and takes them over on the others.

    Invariants:
        1. Every rank takes part in the broadcast of each batch in which any row is sampled, in the order of batches.
        2. Before the inputs of a batch are made, the tokens of all earlier steps of its requests have arrived.
        3. A token whose request has left its slot meanwhile is dropped: the slot may be somebody else's.

    Attributes:
        generations_np: `[max_num_reqs]` how often each slot was freed.
        awaited_np: `[max_num_reqs]` number of the last batch under way that holds a token for the slot.
    """

    def __init__(
        self,
        pp_group: GroupCoordinator,
        max_num_reqs: int,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        self.pp_group = pp_group
        self.device = device
        # Of a message: token, number of rejected drafts, drafts.
        self.num_columns = 2 + num_speculative_tokens if num_speculative_tokens else 1
        self.pending: deque[PendingRecv] = deque()
        self.num_announced = 0
        self.num_taken = 0
        self.generations_np = np.zeros(max_num_reqs, dtype=np.int64)
        self.awaited_np = np.zeros(max_num_reqs, dtype=np.int64)
        # What the last stage sends must stay as it is until it is sent.
        self._sent: tuple[Transfer, Tensor] | None = None

    def on_req_idx_freed(self, slot: int) -> None:
        """A request has left its slot."""
        self.generations_np[slot] += 1
        self.awaited_np[slot] = 0

    def broadcast(
        self, batch: InputBatch, sampled: SamplerOutput, draft_tokens: Tensor | None = None
    ) -> None:
        """On the last stage: send `[num_reqs, num_columns]` to all others."""
        if not batch.is_sampled_np.any():
            return
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None
        message = sampled.sampled_token_ids.view(-1, 1)
        if draft_tokens is not None:
            num_rejected = sampled.num_rejected
            if num_rejected is None:
                num_rejected = torch.zeros_like(sampled.sampled_token_ids)
            message = torch.cat((message, num_rejected.view(-1, 1), draft_tokens), dim=1)
        with self._span("dist.send", message):
            message = message.contiguous()
            transfer = self.pp_group.broadcast_from_last(message)
            if transfer is not None:
                self._sent = transfer, message

    def receive(self, batch: InputBatch) -> None:
        """On other stages: announce that the tokens of `batch` will be received. Does not wait."""
        if not batch.is_sampled_np.any():
            return
        self.num_announced += 1
        message = torch.empty((batch.num_reqs, self.num_columns), dtype=torch.int64, device=self.device)
        rows_np, slots_np = np.flatnonzero(batch.is_sampled_np), batch.idx_mapping_np
        self.awaited_np[slots_np[rows_np]] = self.num_announced
        self.pending.append(
            PendingRecv(
                self.num_announced,
                self.pp_group.broadcast_from_last(message),
                message,
                batch.seq_lens.clone(),
                slots_np,
                rows_np,
                self.generations_np[slots_np],
            )
        )

    def take_sampled_tokens(self, states: RequestState, slots: list[int]) -> None:
        """Bring the states up to date: wait for the tokens of these slots, and take what else has arrived."""
        if not self.pending:
            return
        needed = int(self.awaited_np[slots].max(initial=0))
        while self.pending and (
            self.num_taken < needed
            or (transfer := self.pending[0].transfer) is None
            or transfer.is_completed()
        ):
            self._take(states, self.pending.popleft())

    def _take(self, states: RequestState, entry: PendingRecv) -> None:
        if entry.transfer is not None:
            with self._span("dist.recv", entry.message):
                entry.transfer.wait()
        self.num_taken = entry.number
        rows_np = entry.rows_np
        slots_np = entry.slots_np[rows_np]
        alive = self.generations_np[slots_np] == entry.generations_np[rows_np]
        if not alive.all():
            rows_np, slots_np = rows_np[alive], slots_np[alive]
        if not len(rows_np):
            return
        message, seq_lens, slots = entry.message, entry.seq_lens, async_copy_to_gpu(slots_np, self.device)
        if len(rows_np) < len(entry.slots_np):
            rows = async_copy_to_gpu(rows_np, self.device)
            message, seq_lens = message.index_select(0, rows), seq_lens.index_select(0, rows)
        if self.num_columns > 1:
            # The end of the step has counted all drafts as computed.
            seq_lens = seq_lens - message[:, 1]
            states.num_computed_tokens.gpu.index_copy_(0, slots, seq_lens)
            put_draft_tokens(slots, seq_lens, states, message[:, 2:])
        post_update_tokens(slots, seq_lens, states, message[:, 0])

    def _span(self, name: str, message: Tensor) -> tracing.Span:
        group = self.pp_group
        return tracing.span(
            name, group=group.unique_name, src=group.last_rank, bytes=message.nbytes, what="sampled tokens"
        )
