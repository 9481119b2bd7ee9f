"""One step's batch, and the buffers its inputs are written to.

vLLM 0.25.1: vllm/v1/worker/gpu/input_batch.py (InputBatch, InputBuffers, prepare_prefill_inputs,
prepare_pos_seq_lens, post_update)
Articles: part 1 §7, §8.3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.worker.gpu.buffer_utils import async_copy_to_gpu
from minivllm.worker.gpu.states import RequestState


class InputBuffers:
    """Inputs of the model at addresses that stay the same from step to step.

    Attributes:
        input_ids, positions: `[max_num_tokens]`.
        seq_lens: `[max_num_reqs]`.
        arange: `[max(max_num_tokens, max_num_reqs)]` 0, 1, 2 …; arange_np: `[max_num_reqs + 1]`, on the CPU.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        self.max_num_reqs, self.max_num_tokens, self.device = max_num_reqs, max_num_tokens, device
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.arange = torch.arange(max(max_num_tokens, max_num_reqs), device=device)
        self.arange_np = np.arange(max_num_reqs + 1)
        # The last batch in which everybody decoded, with what it was made from; see advance.
        self.decoded: tuple[InputBatch, int, dict[str, int]] | None = None


@dataclass(slots=True)
class InputBatch:
    """The requests of one step, in the order of the batch: those with the fewest tokens first.

    Attributes:
        idx_mapping: `[num_reqs]` row of the batch → slot; idx_mapping_np the same on the CPU.
        num_scheduled_tokens: `[num_reqs]`.
        query_start_loc_np: `[num_reqs + 1]` first token of each row.
        seq_lens: `[num_reqs]` tokens of each request in the cache after this step; seq_lens_np is what the
            scheduler thinks they are.
        input_ids, positions: `[num_tokens]`.
        token_slots: `[num_tokens]` slot of each token's request.
        logits_indices: `[num_logits]` the tokens that something is chosen after: the last of each row, and as many
            before it as the row has drafts; None when each row has one token.
        is_sampled_np: `[num_reqs]` whether the row's next token is sampled, or its prompt is not done yet.
        all_sampled: whether that is so for all rows.
        num_draft_tokens_np: `[num_reqs]` how many of a row's last tokens are drafts; None when there are none at all.
    """

    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    query_start_loc_np: np.ndarray
    seq_lens: Tensor
    seq_lens_np: np.ndarray
    input_ids: Tensor
    positions: Tensor
    token_slots: Tensor
    logits_indices: Tensor | None
    is_sampled_np: np.ndarray
    all_sampled: bool
    num_draft_tokens_np: np.ndarray | None = None


def make_input_batch(
    num_scheduled_tokens: dict[str, int],
    states: RequestState,
    buffers: InputBuffers,
    draft_tokens: dict[str, list[int]] | None = None,
) -> InputBatch:
    """Order the requests, decode before prefill, and write the model's inputs.

    Args:
        num_scheduled_tokens: request → number of tokens, not empty.
        draft_tokens: request → the last of them, which are to be verified. Only their number matters: they stand where
            put_draft_tokens has put them.
    """
    decoded = buffers.decoded
    if decoded is not None and decoded[1] == states.version and decoded[2] == num_scheduled_tokens:
        return advance(decoded[0], states)
    device, num_reqs = buffers.device, len(num_scheduled_tokens)
    num_tokens_np = np.fromiter(num_scheduled_tokens.values(), np.int64, num_reqs)
    req_ids = list(num_scheduled_tokens)
    num_tokens = int(num_tokens_np.sum())
    if num_tokens > num_reqs:
        order = np.argsort(num_tokens_np, kind="stable")
        num_tokens_np = num_tokens_np[order]
        req_ids = [req_ids[i] for i in order]
    idx_mapping_np = np.fromiter(map(states.req_id_to_index.__getitem__, req_ids), np.int64, num_reqs)
    idx_mapping = async_copy_to_gpu(idx_mapping_np, device)
    seq_lens_np = states.num_computed_tokens_np[idx_mapping_np] + num_tokens_np
    # How far each request will be beyond its prefill: the smallest value tells whether anybody prefills at all.
    beyond_prefill_np = seq_lens_np - states.prefill_len.np[idx_mapping_np]
    least_beyond_prefill = int(beyond_prefill_np.min())
    input_ids = buffers.input_ids[:num_tokens]
    positions = buffers.positions[:num_tokens]
    seq_lens = buffers.seq_lens[:num_reqs]
    num_computed = states.num_computed_tokens.gpu
    logits_indices: Tensor | None
    num_draft_tokens_np = None
    if num_tokens == num_reqs:
        # One token each: rows are tokens.
        query_start_loc_np = buffers.arange_np[: num_reqs + 1]
        token_slots, logits_indices = idx_mapping, None
        torch.index_select(num_computed, 0, idx_mapping, out=positions)
        torch.add(positions, 1, out=seq_lens)
    else:
        query_start_loc_np = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(num_tokens_np, out=query_start_loc_np[1:])
        row_of_token = async_copy_to_gpu(np.repeat(np.arange(num_reqs), num_tokens_np), device)
        query_start_loc = async_copy_to_gpu(query_start_loc_np, device)
        token_slots = idx_mapping.index_select(0, row_of_token)
        starts = num_computed.index_select(0, idx_mapping) - query_start_loc[:-1]
        torch.add(buffers.arange[:num_tokens], starts.index_select(0, row_of_token), out=positions)
        torch.add(starts, query_start_loc[1:], out=seq_lens)
        logits_indices = query_start_loc[1:] - 1
        if draft_tokens:
            num_draft_tokens_np, logits_indices = find_draft_tokens(
                req_ids, draft_tokens, query_start_loc_np, device
            )
    if least_beyond_prefill > 0 and num_draft_tokens_np is None:
        # Nobody prefills: the inputs are the tokens sampled last, which the CPU need not know.
        torch.index_select(states.last_sampled_tokens, 0, token_slots, out=input_ids)
    else:
        # Includes what was sampled before, since post_update adds it to all_token_ids.
        entry = torch.add(positions, token_slots, alpha=states.all_token_ids.row_size)
        input_ids.copy_(states.all_token_ids.flat.index_select(0, entry))
    batch = InputBatch(
        req_ids=req_ids,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        num_scheduled_tokens=num_tokens_np,
        query_start_loc_np=query_start_loc_np,
        seq_lens=seq_lens,
        seq_lens_np=seq_lens_np,
        input_ids=input_ids,
        positions=positions,
        token_slots=token_slots,
        logits_indices=logits_indices,
        is_sampled_np=beyond_prefill_np >= 0,
        all_sampled=least_beyond_prefill >= 0,
        num_draft_tokens_np=num_draft_tokens_np,
    )
    if num_tokens == num_reqs and least_beyond_prefill > 0 and not draft_tokens:
        buffers.decoded = batch, states.version, num_scheduled_tokens
    return batch


def advance(batch: InputBatch, states: RequestState) -> InputBatch:
    """The same requests decode once more: the batch of the step before, with the next token of each.

    Deviation from vLLM: there each step orders its batch anew. Most steps differ from the one before by nothing but
    these four lines, and on a CPU making everything again takes four times as long.
    """
    slots = batch.idx_mapping
    torch.index_select(states.num_computed_tokens.gpu, 0, slots, out=batch.positions)
    torch.add(batch.positions, 1, out=batch.seq_lens)
    torch.index_select(states.last_sampled_tokens, 0, slots, out=batch.input_ids)
    batch.seq_lens_np = states.num_computed_tokens_np[batch.idx_mapping_np] + 1
    return batch


def find_draft_tokens(
    req_ids: list[str],
    draft_tokens: dict[str, list[int]],
    query_start_loc_np: np.ndarray,
    device: torch.device,
) -> tuple[np.ndarray, Tensor]:
    """`[num_reqs]` number of drafts, and `[num_logits]` logits_indices, of a batch in which there are any."""
    num_drafts_np = np.fromiter(
        (len(draft_tokens.get(req_id, ())) for req_id in req_ids), np.int64, len(req_ids)
    )
    ends = query_start_loc_np[1:]
    indices = [np.arange(end - 1 - n, end) for end, n in zip(ends, num_drafts_np, strict=True)]
    return num_drafts_np, async_copy_to_gpu(np.concatenate(indices), device)


def post_update(
    batch: InputBatch, states: RequestState, sampled_token_ids: Tensor, num_rejected: Tensor | None = None
) -> None:
    """Advance the states on the device: tokens computed, last token, token history.

    Args:
        sampled_token_ids: `[num_reqs]` last new token; the entries of rows whose prompt is not done yet mean nothing.
        num_rejected: `[num_reqs]` drafts that count as if they had never been computed.
    """
    if num_rejected is not None:
        batch.seq_lens.sub_(num_rejected)
    slots, seq_lens = batch.idx_mapping, batch.seq_lens
    post_update_num_computed_tokens(batch, states)
    if not batch.all_sampled:
        # The token after a partly computed prompt stands in the prompt already.
        rows = async_copy_to_gpu(np.flatnonzero(batch.is_sampled_np), slots.device)
        slots, seq_lens, sampled_token_ids = slots[rows], seq_lens[rows], sampled_token_ids[rows]
    post_update_tokens(slots, seq_lens, states, sampled_token_ids)


def post_update_num_computed_tokens(batch: InputBatch, states: RequestState) -> None:
    """The part that can be done before the tokens are known."""
    states.num_computed_tokens.gpu.index_copy_(0, batch.idx_mapping, batch.seq_lens)


def post_update_tokens(
    slots: Tensor, seq_lens: Tensor, states: RequestState, sampled_token_ids: Tensor
) -> None:
    """The part that needs the tokens; all arguments `[n]`, for rows whose token was sampled."""
    states.last_sampled_tokens.index_copy_(0, slots, sampled_token_ids)
    entry = torch.add(seq_lens, slots, alpha=states.all_token_ids.row_size)
    states.all_token_ids.flat.index_copy_(0, entry, sampled_token_ids.to(torch.int32))


def put_draft_tokens(slots: Tensor, seq_lens: Tensor, states: RequestState, draft_tokens: Tensor) -> None:
    """Write what is proposed behind the tokens that stand, where inputs are read from; accepted drafts are in place then.

    Deviation from vLLM: drafts have a table of their own there (RequestState.draft_tokens), from which each step copies
    them. Here too they never leave the device, and a step needs to be told only how many it verifies.

    Args:
        slots, seq_lens: `[n]` and the number of tokens computed; the token sampled last is at that position.
        draft_tokens: `[n, num_speculative_tokens]`.
    """
    position = torch.add(seq_lens + 1, slots, alpha=states.all_token_ids.row_size).view(-1, 1)
    entry = position + torch.arange(draft_tokens.shape[1], device=slots.device)
    states.all_token_ids.flat.index_copy_(0, entry.view(-1), draft_tokens.reshape(-1).to(torch.int32))
