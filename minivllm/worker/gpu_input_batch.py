"""The persistent batch of the V1 runner: row i of every table is row i of the next forward pass.

vLLM 0.25.1: vllm/v1/worker/gpu_input_batch.py (CachedRequestState, InputBatch), vllm/v1/utils.py (CpuGpuBuffer)
Articles: part 1 §7

The idea: consecutive steps have nearly the same requests, so what they have in common is kept and only the difference
is applied. The price is that the order of the tables is the order of the batch. A request that leaves makes a hole,
which must be filled (condense), and attention wants decodes first, so that rows change places (swap_states). Each move
takes along everything that belongs to the row, on the CPU, in tables that the device then gets copies of.

V2 separates the two: a request has a slot that it keeps (worker/gpu/states.py), and a batch is a list of slots
(idx_mapping in worker/gpu/input_batch.py). Neither condense nor swap_states has a counterpart there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.sample.logits_processor import (
    AddedRequest,
    BatchUpdate,
    BatchUpdateBuilder,
    MoveDirectionality,
    MovedRequest,
)
from minivllm.sample.metadata import SamplingMetadata
from minivllm.sampling_params import SamplingParams
from minivllm.worker.block_table import BlockTable
from minivllm.worker.gpu.sample.output import LogprobsTensors


@dataclass(slots=True)
class CachedRequestState:
    """What the runner knows of a request, whether or not it is in the batch.

    V1 keeps everything twice: here, and in the batch's row while there is one. A request that is not scheduled in a
    step loses its row and gets another one later, filled from here. In V2 the slot is the only place.

    Attributes:
        prefill_len: tokens to compute before the next one can be sampled.
        num_computed_tokens: before the present step.
        output_token_ids: grows with each token; the batch's row holds the same list.
        spec_token_ids: what was proposed last to come next.
        prompt_logprobs: rows computed so far; None when none are asked for, or all are out.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    output_token_ids: list[int]
    prefill_len: int
    spec_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[LogprobsTensors] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class CpuGpuBuffer:
    """A buffer that is written on the CPU and copied to the device; on a CPU both are the same memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu: Tensor = self.cpu.to(device)

    def copy_to_gpu(self, n: int) -> Tensor:
        """The first `n` entries, on the device."""
        self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        return self.gpu[:n]


@dataclass(slots=True)
class BatchMoves:
    """How many rows a step had to touch so that the batch is dense and in order; for the trace."""

    filled: int = 0
    condensed: int = 0
    swapped: int = 0


class InputBatch:
    """The rows.

    Invariants, between two calls of refresh_metadata:
        1. Rows 0 to num_reqs - 1 are in use: there is no hole. (condense)
        2. req_ids and req_id_to_index say the same.
        3. Everything that is kept for a request is in its row, wherever that has moved. (_move, swap_states)
        4. A new request takes the lowest hole; only holes that are left over are filled from the end, one move for
           each, and no other row moves. (add_request, condense)
        5. Rows with one token come before all others, after at most as many swaps as there are rows on the wrong
           side. (reorder)
        6. Logits processors are told of each change, in an order that leads to the present rows. (refresh_metadata)
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.device = device
        self._req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        # The last column takes the token that is sampled when the model's length is reached.
        self.token_ids_cpu = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed_tokens_cpu = np.zeros(max_num_reqs, dtype=np.int64)
        self.block_table = BlockTable(block_size, max_num_reqs, max_model_len, device)

        # Sampling: one table per parameter, and a set of those who use it, by which the sampler skips what nobody
        # uses. In V2 each feature is a file of its own with tables by slot (worker/gpu/sample/).
        self.temperature_cpu = np.zeros(max_num_reqs, dtype=np.float32)
        self.top_p_cpu = np.ones(max_num_reqs, dtype=np.float32)
        self.top_k_cpu = np.zeros(max_num_reqs, dtype=np.int32)
        self.min_p_cpu = np.zeros(max_num_reqs, dtype=np.float32)
        self.frequency_penalties_cpu = np.zeros(max_num_reqs, dtype=np.float32)
        self.presence_penalties_cpu = np.zeros(max_num_reqs, dtype=np.float32)
        self.repetition_penalties_cpu = np.ones(max_num_reqs, dtype=np.float32)
        # Deviation from vLLM: V1 has a torch.Generator per request, whose state has to move with the row and to be
        # wound back after a chunk of a prompt. A seed and a position say the same, and give V2's tokens.
        self.seeds_cpu = np.zeros(max_num_reqs, dtype=np.int64)
        self.random_reqs: set[str] = set()
        self.top_p_reqs: set[str] = set()
        self.top_k_reqs: set[str] = set()
        self.min_p_reqs: set[str] = set()
        self.penalties_reqs: set[str] = set()
        self.num_logprobs: dict[str, int] = {}
        # By row, so that these move, too.
        self.logit_bias: dict[int, dict[int, float]] = {}
        self.min_tokens: dict[int, tuple[int, list[int]]] = {}
        self.bad_words_token_ids: dict[int, list[list[int]]] = {}
        self.req_output_token_ids: list[list[int] | None] = []

        # Deviation from vLLM: swap_states and condense write out every table by name there, and one that is forgotten
        # in one of them gives a request another one's temperature. Here a table is moved because it is in a list.
        self._tables: tuple[np.ndarray, ...] = (
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens_cpu,
            self.temperature_cpu,
            self.top_p_cpu,
            self.top_k_cpu,
            self.min_p_cpu,
            self.frequency_penalties_cpu,
            self.presence_penalties_cpu,
            self.repetition_penalties_cpu,
            self.seeds_cpu,
        )
        self._sparse_tables: tuple[dict[int, Any], ...] = (
            self.logit_bias,
            self.min_tokens,
            self.bad_words_token_ids,
        )
        self._sets: tuple[set[str], ...] = (
            self.random_reqs,
            self.top_p_reqs,
            self.top_k_reqs,
            self.min_p_reqs,
            self.penalties_reqs,
        )
        self.batch_update_builder = BatchUpdateBuilder()
        self.moves = BatchMoves()
        self.sampling_metadata = self._make_sampling_metadata()

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> list[str]:
        """Row → request; without holes, that is, after condense."""
        return [req_id for req_id in self._req_ids if req_id is not None]

    # --- requests come and go

    def add_request(self, request: CachedRequestState, stop_token_ids: list[int]) -> int:
        """Give a request a row and copy into it all that is known.

        Args:
            stop_token_ids: what must not be sampled before min_tokens.

        Returns:
            The row.

        Raises:
            RuntimeError: all rows are taken.
        """
        row = self.batch_update_builder.pop_removed()
        if row is not None:
            self.moves.filled += 1
        else:
            row = len(self._req_ids)
            if row == self.max_num_reqs:
                raise RuntimeError(f"no row for request {request.req_id}: all {self.max_num_reqs} are taken")
            self._req_ids.append(None)
            self.req_output_token_ids.append(None)
        req_id, params = request.req_id, request.sampling_params
        self.batch_update_builder.added.append(
            AddedRequest(row, params, request.prompt_token_ids, request.output_token_ids)
        )
        self._req_ids[row] = req_id
        self.req_id_to_index[req_id] = row
        self.req_output_token_ids[row] = request.output_token_ids

        num_prompt_tokens, num_tokens = len(request.prompt_token_ids), request.num_tokens
        self.token_ids_cpu[row, :num_prompt_tokens] = request.prompt_token_ids
        self.token_ids_cpu[row, num_prompt_tokens:num_tokens] = request.output_token_ids
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens_cpu[row] = request.num_computed_tokens
        self.block_table.add_row(request.block_ids, row)

        self.temperature_cpu[row] = 0 if params.is_greedy else params.temperature
        limits_top_k = 0 < params.top_k < self.vocab_size
        self.top_k_cpu[row] = params.top_k if limits_top_k else self.vocab_size
        self.top_p_cpu[row] = params.top_p
        self.min_p_cpu[row] = params.min_p
        self.frequency_penalties_cpu[row] = params.frequency_penalty
        self.presence_penalties_cpu[row] = params.presence_penalty
        self.repetition_penalties_cpu[row] = params.repetition_penalty
        self.seeds_cpu[row] = request.seed
        has_penalties = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        for users, uses in (
            (self.random_reqs, not params.is_greedy),
            (self.top_p_reqs, params.top_p < 1),
            (self.top_k_reqs, limits_top_k),
            (self.min_p_reqs, params.min_p > 0),
            (self.penalties_reqs, has_penalties),
        ):
            if uses:
                users.add(req_id)
        if params.logprobs is not None:
            self.num_logprobs[req_id] = params.logprobs
        if params.logit_bias:
            self.logit_bias[row] = {t: v for t, v in params.logit_bias.items() if 0 <= t < self.vocab_size}
        if params.min_tokens:
            stop = [t for t in stop_token_ids if 0 <= t < self.vocab_size]
            self.min_tokens[row] = (params.min_tokens, stop)
        if params.bad_words_token_ids:
            self.bad_words_token_ids[row] = [
                word
                for word in params.bad_words_token_ids
                if word and all(0 <= t < self.vocab_size for t in word)
            ]
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Take a request's row away; None when it has none. Leaves a hole: condense must follow."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        self.batch_update_builder.removed_append(row)
        self._req_ids[row] = None
        self.req_output_token_ids[row] = None
        self.block_table.clear_row(row)
        for users in self._sets:
            users.discard(req_id)
        self.num_logprobs.pop(req_id, None)
        for table in self._sparse_tables:
            table.pop(row, None)
        return row

    # --- rows move

    def condense(self) -> None:
        """Fill the holes that new requests have left over, from the end of the batch."""
        builder, num_reqs = self.batch_update_builder, self.num_reqs
        last = len(self._req_ids) - 1
        while builder.removed and builder.removed[-1] < num_reqs:
            while self._req_ids[last] is None:
                last -= 1
            hole = builder.pop_removed()
            assert hole is not None and hole < last
            self._move(last, hole)
            last -= 1
        del self._req_ids[num_reqs:]
        del self.req_output_token_ids[num_reqs:]

    def _move(self, source: int, target: int) -> None:
        req_id = self._req_ids[source]
        assert req_id is not None and self._req_ids[target] is None
        self._req_ids[target], self._req_ids[source] = req_id, None
        self.req_output_token_ids[target] = self.req_output_token_ids[source]
        self.req_output_token_ids[source] = None
        self.req_id_to_index[req_id] = target
        # Tokens beyond the request's own are never read; a whole row may be hundreds of kilobytes.
        num_tokens = self.num_tokens[source]
        self.token_ids_cpu[target, :num_tokens] = self.token_ids_cpu[source, :num_tokens]
        self.block_table.move_row(source, target)
        for table in self._tables:
            table[target] = table[source]
        for sparse in self._sparse_tables:
            if source in sparse:
                sparse[target] = sparse.pop(source)
        self.batch_update_builder.moved.append(
            MovedRequest(source, target, MoveDirectionality.UNIDIRECTIONAL)
        )
        self.moves.condensed += 1

    def reorder(self, num_scheduled_tokens: dict[str, int]) -> None:
        """Bring rows with one token to the front, by swapping the first that is not with the last that is."""
        single = [num_scheduled_tokens[req_id] == 1 for req_id in self.req_ids]
        first, last = 0, len(single) - 1
        while True:
            while first < last and single[first]:
                first += 1
            while first < last and not single[last]:
                last -= 1
            if first >= last:
                return
            self.swap_states(first, last)
            first, last = first + 1, last - 1

    def swap_states(self, first: int, second: int) -> None:
        """Let two rows change places."""
        rows, swapped = [first, second], [second, first]
        first_id, second_id = self._req_ids[first], self._req_ids[second]
        assert first_id is not None and second_id is not None
        self._req_ids[first], self._req_ids[second] = second_id, first_id
        self.req_id_to_index[first_id], self.req_id_to_index[second_id] = second, first
        outputs = self.req_output_token_ids
        outputs[first], outputs[second] = outputs[second], outputs[first]
        longest = int(self.num_tokens[rows].max())
        self.token_ids_cpu[rows, :longest] = self.token_ids_cpu[swapped, :longest]
        self.block_table.swap_row(first, second)
        for table in self._tables:
            table[rows] = table[swapped]
        for sparse in self._sparse_tables:
            both = {first: sparse.pop(second, None), second: sparse.pop(first, None)}
            sparse.update({row: value for row, value in both.items() if value is not None})
        self.batch_update_builder.moved.append(MovedRequest(first, second, MoveDirectionality.SWAP))
        self.moves.swapped += 1

    # --- what the sampler sees

    def refresh_metadata(self) -> BatchUpdate | None:
        """Make the sampling metadata of the present rows, if any of them has changed hands.

        Returns:
            What happened to the rows since the last call, for logits processors.
        """
        update = self.batch_update_builder.get_and_reset(self.num_reqs)
        if update is not None:
            self.sampling_metadata = self._make_sampling_metadata()
        return update

    def _make_sampling_metadata(self) -> SamplingMetadata:
        n, device = self.num_reqs, self.device

        def upload(table: np.ndarray, used: Any) -> Tensor | None:
            # A copy: the table's rows may move while the device still reads.
            return torch.from_numpy(table[:n].copy()).to(device) if used else None

        penalties = [
            None if table is None else table.view(-1, 1)
            for table in (
                upload(self.repetition_penalties_cpu, self.penalties_reqs),
                upload(self.presence_penalties_cpu, self.penalties_reqs),
                upload(self.frequency_penalties_cpu, self.penalties_reqs),
            )
        ]
        return SamplingMetadata(
            temperature=upload(self.temperature_cpu, self.random_reqs),
            seeds=upload(self.seeds_cpu, self.random_reqs),
            top_k=upload(self.top_k_cpu, self.top_k_reqs),
            top_p=upload(self.top_p_cpu, self.top_p_reqs),
            min_p=upload(self.min_p_cpu, self.min_p_reqs),
            max_top_k=int(self.top_k_cpu[:n].max(initial=0)),
            repetition_penalties=penalties[0],
            presence_penalties=penalties[1],
            frequency_penalties=penalties[2],
            prompt_mask=self._make_prompt_mask() if self.penalties_reqs else None,
            output_token_ids=[tokens for tokens in self.req_output_token_ids if tokens is not None],
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            bad_words_token_ids=self.bad_words_token_ids,
            max_num_logprobs=max(self.num_logprobs.values(), default=None),
        )

    def _make_prompt_mask(self) -> Tensor:
        """`[num_reqs, vocab_size]`. V2 makes the row of a request once, when the request comes; here a change of any
        row makes all of them again."""
        mask = np.zeros((self.num_reqs, self.vocab_size), dtype=bool)
        for row in range(self.num_reqs):
            mask[row, self.token_ids_cpu[row, : self.num_prompt_tokens[row]]] = True
        return torch.from_numpy(mask).to(self.device)
