"""The V1 model runner: the old way, in one class, to be read beside Model Runner V2.

vLLM 0.25.1: vllm/v1/worker/gpu_model_runner.py (GPUModelRunner)
Articles: part 1 §5, §6, §7

It gives the same tokens as V2 and is called in the same way. What is different is where things are: here, the batch is a
set of rows that persists and has to be kept dense and in order (gpu_input_batch.py), inputs are put together on the CPU
and copied, sampled tokens come back to the CPU before the next step can be prepared, and whatever any feature needs is
in the middle of this class. vLLM's has 7,689 lines, since what is done here for one kind of model and one device it does
for all. Each method says what V2 does instead.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm import tracing
from minivllm.config import SpeculativeConfig, VllmConfig
from minivllm.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from minivllm.distributed.parallel_state import Transfer, get_pp_group
from minivllm.forward_context import set_forward_context
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.model_executor.layers.attention import AttentionMetadata
from minivllm.model_executor.model_loader import get_model_loader
from minivllm.model_executor.model_loader.default_loader import DTYPES
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from minivllm.platforms import get_platform
from minivllm.sample.logits_processor import build_logitsprocs
from minivllm.sample.sampler import Sampler
from minivllm.sequence import IntermediateTensors
from minivllm.spec_decode.draft_model import DraftModelProposer
from minivllm.tracing.spans import NULL as NO_SPAN
from minivllm.worker.attn_metadata import AttentionMetadataBuilder
from minivllm.worker.block_table import NULL_BLOCK
from minivllm.worker.gpu.attn_utils import build_dummy_attn_metadata, get_kv_cache_spec, init_kv_cache
from minivllm.worker.gpu.sample.gumbel import gumbel_sample
from minivllm.worker.gpu.sample.min_p import apply_min_p
from minivllm.worker.gpu.sample.output import LogprobsTensors
from minivllm.worker.gpu.sample.states import derive_seed
from minivllm.worker.gpu.sample.top_k_top_p import apply_top_k_top_p
from minivllm.worker.gpu.shutdown import free_before_shutdown
from minivllm.worker.gpu.spec_decode.ngram import propose_ngram
from minivllm.worker.gpu_input_batch import BatchMoves, CachedRequestState, CpuGpuBuffer, InputBatch

# Positions whose logits are computed at once for prompt log-probabilities.
_PROMPT_CHUNK = 256


class ExecuteModelState(NamedTuple):
    """What sample_tokens needs of the execute_model before it; hidden states and logits on the last stage only.

    Logits are `[num_logits, vocab_size]`: for each row one, and one more for each of its drafts. num_logits says how many
    each row has, positions where the tokens will be that are chosen. drafts are by row, empty when there are none at all.

    The batch itself is not in here: it is the runner's one and only, so that nothing may touch it in between. V2's batch
    is an object of its own.
    """

    scheduler_output: SchedulerOutput
    hidden_states: Tensor | None
    logits: Tensor | None
    num_logits: list[int]
    positions: Tensor
    drafts: list[list[int]]


class PendingTokens(NamedTuple):
    """Tokens on their way from the last pipeline stage.

    Attributes:
        token_ids: as _broadcast_tokens sends them, valid after transfer.wait().
        receivers: position in token_ids, and whose token it is. Not a row: rows will have moved by then.
    """

    transfer: Transfer | None
    token_ids: Tensor
    receivers: list[tuple[int, CachedRequestState]]


class GPUModelRunner:
    """The runner of one rank; the methods are those of V2's.

    Attributes:
        requests: all requests that are neither finished nor preempted, also those without a row at the moment.
        input_batch: the rows of this step.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        model_config, scheduler_config = vllm_config.model_config, vllm_config.scheduler_config
        assert model_config is not None and model_config.max_model_len is not None
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.device = device
        self.platform = get_platform(device.type)
        self.dtype = DTYPES[model_config.dtype]
        self.max_model_len = model_config.max_model_len
        self.max_num_tokens = scheduler_config.max_num_batched_tokens
        self.max_num_reqs = scheduler_config.max_num_seqs
        self.block_size = vllm_config.cache_config.block_size
        self.vocab_size = model_config.vocab_size
        self.pp_group = get_pp_group()
        self.is_last_pp_rank = self.pp_group.is_last_rank
        self.pending_tokens: deque[PendingTokens] = deque()
        # Where the hidden states of the stage before arrive; None on the first stage.
        self.intermediate_tensors: IntermediateTensors | None = None
        with tracing.span(
            "runner.init", max_num_reqs=self.max_num_reqs, max_num_tokens=self.max_num_tokens
        ) as s:
            self.requests: dict[str, CachedRequestState] = {}
            self.input_batch = InputBatch(
                self.max_num_reqs, self.max_model_len, self.vocab_size, self.block_size, device
            )
            self.input_ids = CpuGpuBuffer(self.max_num_tokens, torch.int64, device)
            self.positions = CpuGpuBuffer(self.max_num_tokens, torch.int64, device)
            self.slot_blocks = CpuGpuBuffer(self.max_num_tokens, torch.int64, device)
            self.slot_offsets = CpuGpuBuffer(self.max_num_tokens, torch.int64, device)
            self.seq_lens = CpuGpuBuffer(self.max_num_reqs, torch.int64, device)
            self.query_start_loc = np.zeros(self.max_num_reqs + 1, dtype=np.int64)
            s.set(
                max_model_len=self.max_model_len,
                input_batch=f"{self.max_num_reqs} rows of {self.max_model_len + 1} tokens",
            )
        self.model: CausalLM | None = None
        self.kv_caches: list[Tensor] = []
        self.execute_model_state: ExecuteModelState | None = None
        self.speculative_config = vllm_config.speculative_config
        self.drafter: DraftModelProposer | None = None
        self.draft_token_ids: DraftTokenIds | None = None

    # --- start-up

    def load_model(self) -> None:
        """Build the model with this rank's weights.

        V2 then asks a ModelState what this kind of model wants otherwise. Here there is nobody to ask: in vLLM's V1,
        flags of the model (uses_mrope, is_encoder_decoder …) are looked at all over the class.
        """
        self.model = get_model_loader().load_model(self.vllm_config, self.device)
        if not self.pp_group.is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(self.max_num_tokens)
        with tracing.span("runner.init_model_state", is_last_pp_rank=self.is_last_pp_rank) as s:
            self.logitsprocs = build_logitsprocs(self.vllm_config, self.device)
            self.sampler = Sampler(self.vocab_size, self.model_config.logprobs_mode)
            self.attn_metadata_builder = AttentionMetadataBuilder(
                self.model_config.get_num_kv_heads(self.vllm_config.parallel_config.tensor_parallel_size),
                self.block_size,
                self.dtype,
                self.device,
            )
            if (
                self.is_last_pp_rank
                and self.speculative_config is not None
                and self.speculative_config.draft_model_config is not None
            ):
                self.drafter = DraftModelProposer(self.vllm_config, self.device)
            self.grammar_bits = torch.arange(32, dtype=torch.int32, device=self.device)
            s.set(
                model_state="none: V1 has no such part",
                sampler=type(self.sampler).__name__,
                logits_processors=str([type(p).__name__ for p in self.logitsprocs]),
            )

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Layer name → spec, for the layers of this rank."""
        specs = get_kv_cache_spec(self.vllm_config, self._model)
        if self.drafter is not None:
            specs |= self.drafter.get_kv_cache_spec()
        return specs

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        with tracing.span("runner.initialize_kv_cache", num_blocks=kv_cache_config.num_blocks) as s:
            self.kv_caches = init_kv_cache(kv_cache_config, self._model, self.dtype, self.device)
            if self.drafter is not None:
                self.kv_caches += self.drafter.initialize_kv_cache(kv_cache_config)
            s.set(
                layers=len(self.kv_caches),
                bytes=kv_cache_config.total_bytes,
                shape=str(list(self.kv_caches[0].shape)),
                block_tables=f"part of the batch: {self.max_num_reqs} x {self.input_batch.block_table.max_blocks}",
                attention="torch scaled_dot_product_attention over gathered pages",
            )

    @torch.inference_mode()
    def profile_run(self, num_tokens: int) -> None:
        """Forward and sampling of a dummy batch: the most memory that a step of `num_tokens` can need."""
        num_reqs = min(self.max_num_reqs, num_tokens)
        with tracing.span("runner.profile_run", num_tokens=num_tokens, num_reqs=num_reqs):
            hidden_states = self._dummy_run(num_tokens, num_reqs)
            if isinstance(hidden_states, Tensor):
                logits = self._model.compute_logits(hidden_states[:num_reqs])
                logits.softmax(dim=-1).sort(dim=-1)
            self.platform.synchronize()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """A forward pass of one token for nobody, so that ranks elsewhere find their peers in the collectives."""
        self._dummy_run(num_tokens=1, num_reqs=1)

    def _dummy_run(self, num_tokens: int, num_reqs: int) -> Tensor | IntermediateTensors:
        self.input_ids.np[:num_tokens] = 0
        self.positions.np[:num_tokens] = np.arange(num_tokens) % self.max_model_len
        return self._dummy_forward(num_tokens, build_dummy_attn_metadata(num_tokens, num_reqs, self.device))

    def _dummy_forward(self, num_tokens: int, metadata: AttentionMetadata) -> Tensor | IntermediateTensors:
        buffers = self.intermediate_tensors
        received = None if buffers is None else buffers.first(num_tokens)
        with set_forward_context(metadata):
            return self._model.forward(
                self.input_ids.copy_to_gpu(num_tokens), self.positions.copy_to_gpu(num_tokens), received
            )

    @torch.inference_mode()
    def warm_up(self) -> list[str]:
        """Dummy forward passes and one dummy sampling.

        V2 sends real requests through its real step (worker/gpu/warmup.py). V1 has a second way through the model for
        dummies, which must be kept like the first.

        Returns:
            What was run, in words.
        """
        num_reqs = min(2, self.max_num_reqs)
        num_tokens = max(num_reqs, min(32, self.max_num_tokens))
        hidden_states = self._dummy_run(num_tokens, num_reqs)
        metadata = AttentionMetadata((self.slot_blocks.gpu[:num_reqs] * 0, self.slot_offsets.gpu[:num_reqs]))
        block_ids = torch.full((num_reqs, 1), NULL_BLOCK, dtype=torch.int64, device=self.device)
        self.attn_metadata_builder.add_decodes(metadata, block_ids, np.ones(num_reqs, dtype=np.int64))
        self._dummy_forward(num_reqs, metadata)
        if not isinstance(hidden_states, Tensor):
            return ["dummy prefill", "dummy decode"]
        logits = self._model.compute_logits(hidden_states[:num_reqs])
        each = torch.ones(num_reqs, device=self.device)
        apply_min_p(logits, each * 0.01)
        apply_top_k_top_p(logits, (each * 5).to(torch.int32), each * 0.9, min(5, self.vocab_size))
        gumbel_sample(logits, each, each.to(torch.int64), each.to(torch.int64))
        return ["dummy prefill", "dummy decode", "dummy sampling"]

    def capture_model(self) -> None:
        """Nothing is captured.

        Deviation from vLLM: V1 has CUDA graphs there. Here only V2 has them, since one way to capture is enough to read.
        """
        reason = "a CPU has no graphs" if self.device.type == "cpu" else "the V1 runner executes eagerly here"
        with tracing.span(
            "runner.capture_model", skipped=True, reason=reason, mode="NONE", sizes="[]", bytes=0
        ):
            pass

    # --- a step: states

    def _update_states(self, scheduler_output: SchedulerOutput) -> BatchMoves:
        """Bring requests and rows up to date with what is scheduled.

        V2 (update_states) removes and adds slots, and that is all: order and density are nobody's concern there.
        """
        batch = self.input_batch
        batch.moves = BatchMoves()
        self._take_pending_tokens(scheduler_output)
        # Finished first: an id may be used again in the very same step.
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            # vLLM's V1 keeps a preempted request and is later sent what is new about it. This scheduler speaks as to
            # V2: the request comes back as a new one, with its output as part of what is to be computed.
            self.requests.pop(req_id, None)
            batch.remove_request(req_id)
        scheduled = scheduler_output.num_scheduled_tokens
        # A request that runs but is not scheduled in this step may not keep its row: rows are the batch. In V2 its
        # slot is just not named. All ranks must have the same rows, and a set has no order that they share; but the
        # order of removals does not matter, as holes are filled by number.
        for req_id in batch.req_id_to_index.keys() - scheduled.keys():
            batch.remove_request(req_id)

        to_add: list[CachedRequestState] = []
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = state = self._make_request_state(new)
            to_add.append(state)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed_tokens, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = self.requests[req_id]
            # The scheduler takes drafts of which it does not know better yet for accepted. Here, all tokens are known.
            num_computed_tokens = min(num_computed_tokens, state.num_tokens - 1)
            state.num_computed_tokens = num_computed_tokens
            state.block_ids.extend(block_ids or ())
            row = batch.req_id_to_index.get(req_id)
            if row is None:
                to_add.append(state)
                continue
            batch.num_computed_tokens_cpu[row] = num_computed_tokens
            if block_ids is not None:
                batch.block_table.append_row(block_ids, row)
        for state in to_add:
            stop = [*self.model_config.eos_token_ids, *(state.sampling_params.stop_token_ids or ())]
            batch.add_request(state, list(dict.fromkeys(stop)))
        if batch.num_reqs != len(scheduled):
            raise RuntimeError(f"scheduled are requests {list(scheduled)}, known are {batch.req_ids}")

        batch.condense()
        batch.reorder(scheduled)
        update = batch.refresh_metadata()
        for processor in self.logitsprocs:
            processor.update_state(update)
        return batch.moves

    def _make_request_state(self, new: NewRequestData) -> CachedRequestState:
        params, num_prompt_tokens = new.sampling_params, len(new.prompt_token_ids)
        output_token_ids = new.prefill_token_ids[num_prompt_tokens:]
        return CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            sampling_params=params,
            seed=derive_seed(self.model_config.seed, new.req_id) if params.seed is None else params.seed,
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=output_token_ids,
            prefill_len=len(new.prefill_token_ids),
            # A request that has output had its prompt's before it was preempted.
            prompt_logprobs=None if params.prompt_logprobs is None or output_token_ids else [],
        )

    # --- a step: inputs

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, drafts: list[list[int]]
    ) -> AttentionMetadata:
        """Put the model's inputs together on the CPU and copy them to the device.

        In order to do that the CPU must know every token, the one sampled last included: so sample_tokens has waited
        for it, and the device was idle from then until now. In V2 (make_input_batch) the device puts the inputs
        together from what it knows itself, and the CPU can be a step ahead.

        Deviation from vLLM: with asynchronous scheduling, V1 puts -1 for a token that it does not know there, and looks
        up on the device where its row of the last batch is now. Here it waits, and gives the same tokens.
        """
        batch = self.input_batch
        num_reqs = batch.num_reqs
        for row, tokens in enumerate(drafts):
            # Behind the tokens that stand, where inputs are read from; num_tokens does not count them.
            start = int(batch.num_tokens[row])
            batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
        num_scheduled = np.fromiter(
            map(scheduler_output.num_scheduled_tokens.__getitem__, batch.req_ids), np.int64, num_reqs
        )
        starts = self.query_start_loc[: num_reqs + 1]
        np.cumsum(num_scheduled, out=starts[1:])
        num_tokens = int(starts[-1])
        rows = np.repeat(np.arange(num_reqs), num_scheduled)
        num_computed = batch.num_computed_tokens_cpu[:num_reqs]
        positions = self.positions.np[:num_tokens]
        np.add(np.arange(num_tokens), (num_computed - starts[:-1])[rows], out=positions)
        self.input_ids.np[:num_tokens] = batch.token_ids_cpu[rows, positions]
        blocks, offsets = batch.block_table.compute_slot_mapping(rows, positions)
        self.slot_blocks.np[:num_tokens], self.slot_offsets.np[:num_tokens] = blocks, offsets
        seq_lens = self.seq_lens.np[:num_reqs]
        np.add(num_computed, num_scheduled, out=seq_lens)
        batch.block_table.commit(num_reqs)

        self.slot_mapping = (
            self.slot_blocks.copy_to_gpu(num_tokens),
            self.slot_offsets.copy_to_gpu(num_tokens),
        )
        return self._build_attn_metadata(self.attn_metadata_builder)

    def _build_attn_metadata(self, builder: AttentionMetadataBuilder) -> AttentionMetadata:
        """The present batch for one model; a draft model has other heads."""
        num_reqs = self.input_batch.num_reqs
        starts = self.query_start_loc[: num_reqs + 1]
        return builder.build(
            self.slot_mapping,
            self.input_batch.block_table.gpu,
            np.diff(starts),
            starts,
            self.seq_lens.np[:num_reqs],
        )

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run the model on the scheduled tokens.

        Args:
            intermediate_tensors: what the pipeline stage before computes for this batch; None on the first.

        Returns:
            None: sample_tokens comes next. Hidden states: likewise, and they are for the next pipeline stage. An empty
            output: there was nothing to compute.
        """
        with tracing.span("runner.execute_model") if tracing.calls else NO_SPAN as step:
            with tracing.span("runner.update_states") if tracing.calls else NO_SPAN as s:
                moves = self._update_states(scheduler_output)
                if tracing.calls:
                    s.set(
                        new=len(scheduler_output.scheduled_new_reqs),
                        cached=scheduler_output.scheduled_cached_reqs.num_reqs,
                        finished=len(scheduler_output.finished_req_ids),
                        preempted=len(scheduler_output.preempted_req_ids),
                        rows_filled=moves.filled,
                        rows_condensed=moves.condensed,
                        rows_swapped=moves.swapped,
                    )
            if not scheduler_output.num_scheduled_tokens:
                return ModelRunnerOutput()
            with tracing.span("runner.prepare_inputs") if tracing.calls else NO_SPAN as s:
                drafts = self._drafts(scheduler_output)
                metadata = self._prepare_inputs(scheduler_output, drafts)
                num_tokens = scheduler_output.total_num_scheduled_tokens
                input_ids = self.input_ids.copy_to_gpu(num_tokens)
                positions = self.positions.copy_to_gpu(num_tokens)
                if tracing.calls:
                    req_ids = self.input_batch.req_ids
                    counts = [scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids]
                    s.set(req_ids=list(req_ids), num_tokens_per_req=counts)
            if intermediate_tensors is not None:
                intermediate_tensors.wait_for_comm()
            with (
                tracing.span("model.forward", graph="none: eager") if tracing.calls else NO_SPAN as s,
                set_forward_context(metadata),
            ):
                output = self._model.forward(input_ids, positions, intermediate_tensors)
                if tracing.calls:
                    s.set(step=scheduler_output.step, pp_rank=self.pp_group.rank_in_group)
            num_reqs = self.input_batch.num_reqs
            hidden_states = logits = None
            num_logits, last_tokens = self._logits_indices(drafts)
            if isinstance(output, Tensor):
                hidden_states = output
                logits = self._model.compute_logits(output.index_select(0, last_tokens))
            self.execute_model_state = ExecuteModelState(
                scheduler_output,
                hidden_states,
                logits,
                num_logits,
                positions.index_select(0, last_tokens) + 1,
                drafts,
            )
            if tracing.calls:
                step.set(
                    step=scheduler_output.step,
                    pp_rank=self.pp_group.rank_in_group,
                    num_reqs=num_reqs,
                    num_tokens=num_tokens,
                    decodes=metadata.num_decodes,
                )
        return None if isinstance(output, Tensor) else output

    def _logits_indices(self, drafts: list[list[int]]) -> tuple[list[int], Tensor]:
        """How many tokens are to be chosen for each row, and after which tokens of the batch, `[num_logits]`."""
        num_logits = [1 + len(tokens) for tokens in drafts] or [1] * self.input_batch.num_reqs
        ends = self.query_start_loc[1 : len(num_logits) + 1]
        last = np.concatenate([np.arange(end - n, end) for n, end in zip(num_logits, ends, strict=True)])
        return num_logits, torch.from_numpy(last).to(self.device)

    # --- a step: tokens

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Choose the tokens of the step that execute_model has run, wait for them, and write them down.

        Returns:
            The tokens; None when no step waits for this (its execute_model failed), and on all pipeline stages but the
            last.
        """
        if self.execute_model_state is None:
            return None
        state = self.execute_model_state
        self.execute_model_state = None
        with tracing.span("runner.sample_tokens") if tracing.calls else NO_SPAN as step:
            if tracing.calls:
                step.set(
                    step=state.scheduler_output.step,
                    pp_rank=self.pp_group.rank_in_group,
                    num_reqs=self.input_batch.num_reqs,
                )
            if state.logits is None or state.hidden_states is None:
                self._receive_tokens()
                return None
            if grammar_output is not None:
                self._apply_grammar_bitmask(state.logits, state.num_logits, grammar_output)
            metadata = self.input_batch.sampling_metadata
            if state.drafts:
                metadata = metadata.expand(state.drafts)
            sampled, logprobs = self.sampler(state.logits, metadata, state.positions, self.logitsprocs)
            with tracing.span("runner.postprocess") if tracing.calls else NO_SPAN:
                output = self._bookkeeping_sync(sampled, logprobs, state.drafts)
            if self.speculative_config is not None:
                self._propose_draft_token_ids(self.speculative_config, output, state.drafts)
            if self.pp_group.world_size > 1 and any(output.sampled_token_ids):
                # Before what nobody waits for.
                self._broadcast_tokens(output.sampled_token_ids)
            output.prompt_logprobs = self._get_prompt_logprobs_dict(
                state.hidden_states, state.scheduler_output
            )
            if tracing.calls:
                step.set(sampled=sum(map(len, output.sampled_token_ids)))
        return output

    def _is_sampled(self) -> np.ndarray:
        """`[num_reqs]`; a row whose prompt is not done yet gets a token that means nothing."""
        num_reqs = self.input_batch.num_reqs
        sampled: np.ndarray = self.seq_lens.np[:num_reqs] >= self.input_batch.num_tokens[:num_reqs]
        return sampled

    def _drafts(self, scheduler_output: SchedulerOutput) -> list[list[int]]:
        """Row → the drafts that this step verifies; empty when it verifies none.

        With asynchronous scheduling only their number is given, and they are what this runner has proposed; a row that
        has fewer is filled up, as any token is as good a guess.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if not scheduled:
            return []
        drafts = []
        for req_id in self.input_batch.req_ids:
            tokens = scheduled.get(req_id, [])
            if tokens and tokens[0] < 0:
                tokens = (self.requests[req_id].spec_token_ids + [0] * len(tokens))[: len(tokens)]
            drafts.append(tokens)
        return drafts

    def _apply_grammar_bitmask(
        self, logits: Tensor, num_logits: list[int], grammar_output: GrammarOutput
    ) -> None:
        """Set the logits of forbidden tokens to -inf, in place. V2: StructuredOutputsWorker."""
        ids = grammar_output.structured_output_request_ids
        with tracing.span("runner.apply_grammar", requests=len(ids)) as s:
            ends = np.cumsum(num_logits)
            each = [self.input_batch.req_id_to_index[req_id] for req_id in ids]
            rows = torch.from_numpy(
                np.concatenate([np.arange(ends[row] - num_logits[row], ends[row]) for row in each])
            ).to(self.device)
            mask = torch.from_numpy(grammar_output.grammar_bitmask).to(self.device)
            allowed = ((mask.unsqueeze(-1) >> self.grammar_bits) & 1).flatten(1)[:, : self.vocab_size].bool()
            logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
            if tracing.calls:
                s.set(allowed=int(allowed.sum()))

    def _get_prompt_logprobs_dict(
        self, hidden_states: Tensor, scheduler_output: SchedulerOutput
    ) -> dict[str, LogprobsLists]:
        """Request → all rows of its prompt, for those whose prompt ends in this step. V2: PromptLogprobsWorker."""
        done: dict[str, LogprobsLists] = {}
        for row, req_id in enumerate(self.input_batch.req_ids):
            request = self.requests[req_id]
            chunks, wanted = request.prompt_logprobs, request.sampling_params.prompt_logprobs
            if chunks is None or wanted is None:
                continue
            num_tokens = scheduler_output.num_scheduled_tokens[req_id]
            first, position = int(self.query_start_loc[row]), request.num_computed_tokens
            # The last token of the prompt predicts the first of the output.
            count = min(num_tokens, len(request.prompt_token_ids) - 1 - position)
            for start in range(0, count, _PROMPT_CHUNK):
                end = min(start + _PROMPT_CHUNK, count)
                targets = request.prompt_token_ids[position + 1 + start : position + 1 + end]
                logits = self._model.compute_logits(hidden_states[first + start : first + end])
                token_ids = torch.tensor(targets, dtype=torch.int64).to(self.device)
                chunks.append(self.sampler.gather_logprobs(logits, wanted, token_ids))
            if position + num_tokens >= len(request.prompt_token_ids):
                request.prompt_logprobs = None
                if chunks:
                    done[req_id] = LogprobsLists(
                        [ids for chunk in chunks for ids in chunk.token_ids.tolist()],
                        [values for chunk in chunks for values in chunk.logprobs.tolist()],
                        [rank for chunk in chunks for rank in chunk.ranks.tolist()],
                    )
        return done

    def _bookkeeping_sync(
        self,
        sampled: Tensor,
        logprobs: LogprobsTensors | None,
        drafts: list[list[int]],
    ) -> ModelRunnerOutput:
        """Wait for the tokens and write them into row and request.

        V2 (post_update) writes them where the next step needs them, on the device, and hands out a copy that is still
        on its way (AsyncOutput).
        """
        batch = self.input_batch
        # Here the CPU stands still until the device has finished the step.
        token_ids: list[int] = sampled.tolist()
        output = ModelRunnerOutput(batch.req_ids)
        on_cpu = None if logprobs is None else logprobs.map(Tensor.cpu)
        is_sampled = self._is_sampled().tolist()
        first = 0
        for row, req_id in enumerate(output.req_ids):
            proposed = drafts[row] if drafts else []
            chosen = token_ids[first : first + 1 + len(proposed)]
            # Drafts stand as long as they are what was chosen; the token chosen after the last of them is new.
            num_new = 1
            while num_new <= len(proposed) and chosen[num_new - 1] == proposed[num_new - 1]:
                num_new += 1
            new_token_ids = chosen[:num_new] if is_sampled[row] else []
            output.sampled_token_ids.append(new_token_ids)
            for token_id in new_token_ids:
                self._append_token(self.requests[req_id], token_id)
            if on_cpu is not None and new_token_ids and req_id in batch.num_logprobs:
                rows, columns = slice(first, first + num_new), slice(batch.num_logprobs[req_id] + 1)
                output.logprobs[req_id] = LogprobsLists(
                    on_cpu.token_ids[rows, columns].tolist(),
                    on_cpu.logprobs[rows, columns].tolist(),
                    on_cpu.ranks[rows].tolist(),
                )
            first += len(chosen)
        return output

    def _append_token(self, request: CachedRequestState, token_id: int) -> None:
        """Write a token down where V1 keeps it: with the request, and in its row if it has one."""
        request.output_token_ids.append(token_id)
        batch, row = self.input_batch, self.input_batch.req_id_to_index.get(request.req_id)
        if row is not None:
            batch.token_ids_cpu[row, batch.num_tokens[row]] = token_id
            batch.num_tokens[row] += 1

    # --- pipeline stages: in V2 a file of its own, PPHandler

    @property
    def _token_columns(self) -> int:
        """Of what is sent per row: new tokens, and what is proposed to come next; both filled up with -1."""
        return 1 + 2 * self.vllm_config.num_speculative_tokens

    def _broadcast_tokens(self, sampled_token_ids: list[list[int]]) -> None:
        """On the last stage: send `[num_reqs, _token_columns]` to all others, which need it as inputs.

        Deviation from vLLM: V1's other stages get them from the scheduler, with the next step (new_token_ids), unless
        scheduling is asynchronous. This scheduler sends no tokens.
        """
        most = self.vllm_config.num_speculative_tokens
        rows = []
        for req_id, new in zip(self.input_batch.req_ids, sampled_token_ids, strict=True):
            drafts = self.requests[req_id].spec_token_ids if new else []
            rows.append(new + [-1] * (1 + most - len(new)) + drafts + [-1] * (most - len(drafts)))
        token_ids = torch.tensor(rows, dtype=torch.int64).to(self.device)
        with self._token_span("dist.send", token_ids):
            transfer = self.pp_group.broadcast_from_last(token_ids)
            if transfer is not None:
                transfer.wait()

    def _receive_tokens(self) -> None:
        """On other stages: note whose tokens will come. Waiting here would keep the stage from the next batch."""
        is_sampled = self._is_sampled()
        if not is_sampled.any():
            return
        shape = len(is_sampled), self._token_columns
        token_ids = torch.empty(shape, dtype=torch.int64, device=self.device)
        req_ids = self.input_batch.req_ids
        receivers = [(row, self.requests[req_ids[row]]) for row in np.flatnonzero(is_sampled).tolist()]
        transfer = self.pp_group.broadcast_from_last(token_ids)
        self.pending_tokens.append(PendingTokens(transfer, token_ids, receivers))

    def _take_pending_tokens(self, scheduler_output: SchedulerOutput) -> None:
        """Write down the tokens that this step needs, and what else has arrived; in order, and before rows move."""
        pending = self.pending_tokens
        needed = 0
        for number, entry in enumerate(pending, 1):
            if any(state.req_id in scheduler_output.num_scheduled_tokens for _, state in entry.receivers):
                needed = number
        while pending and (
            needed > 0 or (transfer := pending[0].transfer) is None or transfer.is_completed()
        ):
            entry, needed = pending.popleft(), needed - 1
            if entry.transfer is not None:
                with self._token_span("dist.recv", entry.token_ids):
                    entry.transfer.wait()
            rows = entry.token_ids.tolist()
            first_draft = 1 + self.vllm_config.num_speculative_tokens
            for row, state in entry.receivers:
                # Gone meanwhile, or another one has its id.
                if self.requests.get(state.req_id) is state:
                    for token_id in rows[row][:first_draft]:
                        if token_id >= 0:
                            self._append_token(state, token_id)
                    state.spec_token_ids = [token_id for token_id in rows[row][first_draft:] if token_id >= 0]

    def _token_span(self, name: str, tokens: Tensor) -> tracing.Span:
        group = self.pp_group
        return tracing.span(name, group=group.unique_name, bytes=tokens.nbytes, what="sampled tokens")

    # --- speculation: in V2 a directory of its own, spec_decode/

    def _propose_draft_token_ids(
        self, config: SpeculativeConfig, output: ModelRunnerOutput, verified: list[list[int]]
    ) -> None:
        """Guess how each row goes on, from its tokens, which are all here, or by a draft model."""
        batch = self.input_batch
        with tracing.span("runner.propose_draft", method=config.method) if tracing.calls else NO_SPAN as s:
            if self.drafter is not None:
                drafts = self._ask_draft_model(self.drafter, output)
            else:
                lens = batch.num_tokens[: batch.num_reqs]
                tokens, counts = propose_ngram(
                    torch.from_numpy(batch.token_ids_cpu[: batch.num_reqs, : lens.max()]),
                    torch.from_numpy(lens),
                    config.prompt_lookup_min,
                    config.prompt_lookup_max,
                    config.num_speculative_tokens,
                )
                rows = zip(tokens.tolist(), counts.tolist(), output.sampled_token_ids, strict=True)
                drafts = [row[:count] if sampled else [] for row, count, sampled in rows]
            self.draft_token_ids = DraftTokenIds(output.req_ids, drafts)
            for req_id, row_drafts in zip(output.req_ids, drafts, strict=True):
                self.requests[req_id].spec_token_ids = row_drafts
            if tracing.calls:
                each = zip(output.sampled_token_ids, verified, strict=True) if verified else ()
                accepted = sum(len(new) - 1 for new, old in each if old)
                s.set(proposed=sum(map(len, drafts)), verified=sum(map(len, verified)), accepted=accepted)

    def _ask_draft_model(self, drafter: DraftModelProposer, output: ModelRunnerOutput) -> list[list[int]]:
        states = [self.requests[req_id] for req_id in output.req_ids]
        if any(state.num_computed_tokens < state.prefill_len for state in states):
            num_tokens = int(self.query_start_loc[len(states)])
            metadata = self._build_attn_metadata(drafter.builder)
            drafter.forward(self.input_ids.gpu[:num_tokens], self.positions.gpu[:num_tokens], metadata)
        drafts: list[list[int]] = [[] for _ in states]
        rows = np.flatnonzero([bool(new) for new in output.sampled_token_ids])
        if len(rows):
            for row, tokens in zip(rows, drafter.propose(self.input_batch, rows, self.sampler), strict=True):
                drafts[row] = tokens.tolist()
        return drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the last step led to; None when nothing is speculated."""
        drafts, self.draft_token_ids = self.draft_token_ids, None
        return drafts

    def shutdown(self) -> None:
        """Drop cache and model, so that an engine in the caller's process leaves no memory behind."""
        self.platform.synchronize()
        self.execute_model_state = self.drafter = None
        free_before_shutdown(self.model, self.kv_caches)
        self.model = None
        self.platform.empty_cache()

    @property
    def _model(self) -> CausalLM:
        assert self.model is not None, "load_model comes first"
        return self.model
