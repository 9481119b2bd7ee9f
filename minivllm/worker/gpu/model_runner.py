"""Model Runner V2: runs one model on one rank, step by step.

vLLM 0.25.1: vllm/v1/worker/gpu/model_runner.py (GPUModelRunner)
Articles: part 1 §5, §7, §8

The rule of this file: it holds what every model and every request needs, and nothing else. What only some need (a
sampling parameter, a parallel mode, a kind of model, a kind of device) lives in a file of its own next door and is
called from here. Be slow to change a line, and slower to add one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm import tracing
from minivllm.config import VllmConfig
from minivllm.core.sched.output import GrammarOutput, SchedulerOutput
from minivllm.distributed.parallel_state import get_pp_group
from minivllm.forward_context import set_forward_context
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.model_executor.model_loader import get_model_loader
from minivllm.model_executor.model_loader.default_loader import DTYPES
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.outputs import DraftTokenIds, ModelRunnerOutput
from minivllm.platforms import get_platform
from minivllm.sequence import IntermediateTensors
from minivllm.tracing.spans import NULL as NO_SPAN
from minivllm.worker.gpu.async_utils import AsyncOutput, make_copy_stream
from minivllm.worker.gpu.attn_utils import build_dummy_attn_metadata, get_kv_cache_spec, init_kv_cache
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.cudagraph_utils import CudaGraphManager, CUDAGraphMode
from minivllm.worker.gpu.input_batch import (
    InputBatch,
    InputBuffers,
    make_input_batch,
    post_update,
    post_update_num_computed_tokens,
)
from minivllm.worker.gpu.model_states import init_model_state
from minivllm.worker.gpu.pp_utils import PPHandler
from minivllm.worker.gpu.sample.output import SamplerOutput
from minivllm.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from minivllm.worker.gpu.sample.sampler import Sampler
from minivllm.worker.gpu.shutdown import free_before_shutdown
from minivllm.worker.gpu.spec_decode import init_speculator
from minivllm.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from minivllm.worker.gpu.spec_decode.speculator import Speculator
from minivllm.worker.gpu.states import RequestState
from minivllm.worker.gpu.structured_outputs import StructuredOutputsWorker


class ExecuteModelState(NamedTuple):
    """What sample_tokens needs of the execute_model before it; hidden states on the last pipeline stage only."""

    input_batch: InputBatch
    hidden_states: Tensor | None
    step: int


class GPUModelRunner:
    """The runner of one rank.

    A step is two calls: execute_model takes over what the scheduler says and runs the model, sample_tokens chooses
    the tokens. Between them the engine may compute what the choice depends on.
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
        pp_group = get_pp_group()
        self.is_first_pp_rank, self.is_last_pp_rank = pp_group.is_first_rank, pp_group.is_last_rank
        self.pp_rank = pp_group.rank_in_group
        self.pp_handler: PPHandler | None = None
        if pp_group.world_size > 1:
            self.pp_handler = PPHandler(
                pp_group, self.max_num_reqs, vllm_config.num_speculative_tokens, device
            )
        # Where the hidden states of the stage before arrive; None on the first stage.
        self.intermediate_tensors: IntermediateTensors | None = None
        with tracing.span(
            "runner.init", max_num_reqs=self.max_num_reqs, max_num_tokens=self.max_num_tokens
        ) as s:
            self.req_states = RequestState(
                self.max_num_reqs, self.max_model_len, device, vllm_config.num_speculative_tokens
            )
            self.input_buffers = InputBuffers(self.max_num_reqs, self.max_num_tokens, device)
            s.set(
                max_model_len=self.max_model_len,
                req_states=f"{self.max_num_reqs} slots of {self.max_model_len + 1} tokens",
                input_buffers=f"{self.max_num_tokens} tokens",
                pp_handler="not built: one pipeline stage" if self.pp_handler is None else "built",
            )
        self.output_copy_stream = make_copy_stream(device)
        self.model: CausalLM | None = None
        self.kv_caches: list[Tensor] = []
        self.rejection_sampler: RejectionSampler | None = None
        self.speculator: Speculator | None = None
        self.execute_model_state: ExecuteModelState | None = None

    def load_model(self) -> None:
        """Build the model with this rank's weights, then what depends on it."""
        self.model = get_model_loader().load_model(self.vllm_config, self.device)
        with tracing.span("runner.init_model_state", is_last_pp_rank=self.is_last_pp_rank) as s:
            self.model_state = init_model_state(self.vllm_config, self.dtype, self.device)
            vocab_size = self.model_config.vocab_size
            self.sampler: Sampler | None = None
            if self.is_last_pp_rank:
                self.sampler = Sampler(
                    self.max_num_reqs,
                    vocab_size,
                    self.device,
                    self.req_states,
                    self.model_config.eos_token_ids,
                    self.model_config.seed,
                )
                self.prompt_logprobs_worker = PromptLogprobsWorker(self.max_num_reqs)
                self.structured_outputs_worker = StructuredOutputsWorker(vocab_size, self.device)
                self.speculator = init_speculator(
                    self.vllm_config, self.req_states, self.sampler.sampling_states, self.device
                )
                if self.speculator is not None:
                    self.rejection_sampler = RejectionSampler(self.sampler, self.device)
            if not self.is_first_pp_rank:
                self.intermediate_tensors = self.model.make_empty_intermediate_tensors(self.max_num_tokens)
            s.set(
                model_state=type(self.model_state).__name__,
                sampler="not built: only the last pipeline stage samples"
                if self.sampler is None
                else "built: this is the last pipeline stage",
                rejection_sampler="not built: no speculative decoding"
                if self.speculator is None
                else f"built: verifies what {type(self.speculator).__name__} proposes",
            )

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Layer name → spec, for the layers of this rank."""
        specs = get_kv_cache_spec(self.vllm_config, self._model)
        if self.speculator is not None:
            specs |= self.speculator.get_kv_cache_spec()
        return specs

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and the tables that say whose blocks are whose."""
        block_size = self.vllm_config.cache_config.block_size
        with tracing.span("runner.initialize_kv_cache", num_blocks=kv_cache_config.num_blocks) as s:
            self.block_tables = BlockTables(block_size, self.max_num_reqs, self.max_model_len, self.device)
            self.kv_caches = init_kv_cache(kv_cache_config, self._model, self.dtype, self.device)
            if self.speculator is not None:
                self.kv_caches += self.speculator.initialize_kv_cache(kv_cache_config, self.block_tables)
            # Not before now: a graph holds the addresses of cache and block tables.
            self.cudagraph_manager = CudaGraphManager(
                self.vllm_config,
                self._model,
                self.model_state,
                self.block_tables,
                self.input_buffers,
                self.intermediate_tensors,
            )
            s.set(
                layers=len(self.kv_caches),
                bytes=kv_cache_config.total_bytes,
                shape=str(list(self.kv_caches[0].shape)),
                block_tables=f"{self.max_num_reqs} x {self.block_tables.max_blocks} blocks of {block_size} tokens",
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
        input_ids = self.input_buffers.input_ids[:num_tokens].zero_()
        positions = self.input_buffers.positions[:num_tokens].zero_()
        buffers = self.intermediate_tensors
        received = None if buffers is None else buffers.first(num_tokens)
        with set_forward_context(build_dummy_attn_metadata(num_tokens, num_reqs, self.device)):
            return self._model.forward(input_ids, positions, received)

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Free the slots of requests that left, fill those of new ones, give blocks to both new and old."""
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            slot = self.req_states.remove_request(req_id)
            if slot is not None and self.pp_handler is not None:
                self.pp_handler.on_req_idx_freed(slot)
            if self.sampler is not None:
                self.prompt_logprobs_worker.remove_request(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            req_id, prompt_len = request.req_id, len(request.prompt_token_ids)
            slot = self.req_states.add_request(
                req_id, prompt_len, request.prefill_token_ids, request.num_computed_tokens
            )
            self.block_tables.append_block_ids(slot, request.block_ids, overwrite=True)
            if self.sampler is not None:
                self.sampler.add_request(slot, request)
                is_resumed = len(request.prefill_token_ids) > prompt_len
                self.prompt_logprobs_worker.add_request(req_id, slot, request.sampling_params, is_resumed)
        if scheduler_output.scheduled_new_reqs:
            self.req_states.apply_staged_writes()
            if self.sampler is not None:
                self.sampler.apply_staged_writes()
        cached = scheduler_output.scheduled_cached_reqs
        index, num_computed_tokens_np = (
            self.req_states.req_id_to_index,
            self.req_states.num_computed_tokens_np,
        )
        for req_id, num_computed_tokens, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            slot = index[req_id]
            num_computed_tokens_np[slot] = num_computed_tokens
            if block_ids is not None:
                self.block_tables.append_block_ids(slot, block_ids, overwrite=False)
        self.block_tables.apply_staged_writes()
        if self.pp_handler is not None:
            slots = [index[req_id] for req_id in cached.req_ids]
            self.pp_handler.take_sampled_tokens(self.req_states, slots)

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
        with tracing.hot_span("runner.execute_model") if tracing.calls else NO_SPAN as step:
            with tracing.hot_span("runner.update_states") if tracing.calls else NO_SPAN as s:
                self.update_states(scheduler_output)
                if tracing.calls:
                    s.attributes = {
                        "new": len(scheduler_output.scheduled_new_reqs),
                        "cached": scheduler_output.scheduled_cached_reqs.num_reqs,
                        "finished": len(scheduler_output.finished_req_ids),
                        "preempted": len(scheduler_output.preempted_req_ids),
                    }
            if not scheduler_output.num_scheduled_tokens:
                return ModelRunnerOutput()
            with tracing.hot_span("runner.prepare_inputs") if tracing.calls else NO_SPAN as s:
                batch = make_input_batch(
                    scheduler_output.num_scheduled_tokens,
                    self.req_states,
                    self.input_buffers,
                    scheduler_output.scheduled_spec_decode_tokens,
                )
                model_inputs = self.model_state.prepare_inputs(batch)
                graph = self.cudagraph_manager.dispatch(batch)
                attn_metadata = None
                if graph.mode is not CUDAGraphMode.FULL:
                    attn_metadata = self.model_state.prepare_attn(batch, self.block_tables)
                if tracing.calls:
                    s.attributes = {
                        "req_ids": batch.req_ids,
                        "num_tokens_per_req": batch.num_scheduled_tokens.tolist(),
                    }
            if intermediate_tensors is not None:
                intermediate_tensors.wait_for_comm()
            with (
                tracing.hot_span(
                    "model.forward",
                    {"graph": graph.text, "step": scheduler_output.step, "pp_rank": self.pp_rank},
                )
                if tracing.calls
                else NO_SPAN,
                set_forward_context(attn_metadata),
            ):
                if graph.mode is CUDAGraphMode.NONE:
                    output = self._model.forward(**model_inputs, intermediate_tensors=intermediate_tensors)
                else:
                    output = self.cudagraph_manager.run(graph, batch)
            hidden_states = output if isinstance(output, Tensor) else None
            self.execute_model_state = ExecuteModelState(batch, hidden_states, scheduler_output.step)
            if tracing.calls:
                step.attributes = {
                    "step": scheduler_output.step,
                    "pp_rank": self.pp_rank,
                    "num_reqs": batch.num_reqs,
                    "num_tokens": batch.num_tokens,
                    "decodes": batch.num_reqs if attn_metadata is None else attn_metadata.num_decodes,
                    "graph": graph.mode._name_,
                }
        return None if isinstance(output, Tensor) else output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncOutput | None:
        """Choose the tokens of the step that execute_model has run, and advance the states.

        Returns:
            The tokens, perhaps still on their way; None when no step waits for this (its execute_model failed), and
            on all pipeline stages but the last, which take the tokens over when they need them.
        """
        if self.execute_model_state is None:
            return None
        batch, hidden_states, step_number = self.execute_model_state
        self.execute_model_state = None
        with (
            tracing.hot_span(
                "runner.sample_tokens",
                {"step": step_number, "pp_rank": self.pp_rank, "num_reqs": batch.num_reqs},
            )
            if tracing.calls
            else NO_SPAN as step
        ):
            if hidden_states is None:
                assert self.pp_handler is not None
                self.pp_handler.receive(batch)
                post_update_num_computed_tokens(batch, self.req_states)
                return None
            sampler_output = self.sample(hidden_states, batch, grammar_output)
            if self.pp_handler is not None and self.speculator is None:
                # First of all: other stages may be waiting for it.
                self.pp_handler.broadcast(batch, sampler_output)
            prompt_logprobs = self.prompt_logprobs_worker.compute_prompt_logprobs(
                self._model.compute_logits, hidden_states, batch, self.req_states
            )
            # Before the states advance, so that on a GPU the copy does not wait for that.
            output = AsyncOutput(
                batch.req_ids,
                None if batch.all_sampled else batch.is_sampled_np,
                sampler_output,
                prompt_logprobs,
                self.output_copy_stream,
            )
            with tracing.hot_span("runner.postprocess") if tracing.calls else NO_SPAN:
                post_update(
                    batch, self.req_states, sampler_output.sampled_token_ids, sampler_output.num_rejected
                )
            if self.speculator is not None:
                draft_tokens = self.speculator.run(batch, sampler_output)
                if self.pp_handler is not None:
                    self.pp_handler.broadcast(batch, sampler_output, draft_tokens)
            if tracing.calls:
                sampled = batch.num_reqs if batch.all_sampled else int(batch.is_sampled_np.sum())
                step.set(sampled=sampled)
        return output

    def sample(
        self, hidden_states: Tensor, batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> SamplerOutput:
        """A token for each row of the batch."""
        if batch.logits_indices is not None:
            hidden_states = hidden_states.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(hidden_states)
        if grammar_output is not None:
            self.structured_outputs_worker.apply_grammar_bitmask(logits, batch, grammar_output)
        sampler = self.rejection_sampler or self.sampler
        assert sampler is not None
        return sampler(logits, batch)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the last step led to; None when nothing is speculated."""
        return None if self.speculator is None else self.speculator.take_draft_token_ids()

    def capture_model(self) -> None:
        """Record CUDA graphs; on a CPU there are none to record."""
        with tracing.span("runner.capture_model") as s:
            self.cudagraph_manager.capture(s)

    def shutdown(self) -> None:
        """Drop cache and model, so that an engine in the caller's process leaves no memory behind."""
        self.platform.synchronize()
        self.execute_model_state = None
        self.speculator = self.rejection_sampler = None
        free_before_shutdown(self.model, self.kv_caches)
        self.model = None
        self.platform.empty_cache()

    @property
    def _model(self) -> CausalLM:
        assert self.model is not None, "load_model comes first"
        return self.model
