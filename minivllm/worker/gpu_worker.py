"""One rank: its device, its process groups, its model runner.

vLLM 0.25.1: vllm/v1/worker/gpu_worker.py (Worker, AsyncIntermediateTensors, init_worker_distributed_environment)
Articles: part 1 §4, §5, §8
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.core.sched.output import GrammarOutput, SchedulerOutput
from minivllm.distributed import parallel_state
from minivllm.distributed.parallel_state import GroupCoordinator
from minivllm.distributed.shm_sizes import max_token_bytes
from minivllm.exceptions import ConfigError
from minivllm.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from minivllm.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from minivllm.platforms import Platform, get_platform
from minivllm.sequence import IntermediateTensors
from minivllm.worker.worker_base import WorkerBase

if TYPE_CHECKING:
    from minivllm.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from minivllm.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

F = TypeVar("F", bound=Callable[..., Any])
# A CPU measures no memory; a forward pass of this many tokens finds what would fail.
_CPU_PROFILE_TOKENS = 256


def _abort_peers_on_error(step: F) -> F:
    """Whoever fails in the middle of a step leaves its peers waiting in a collective; let them fail at once, too."""

    @functools.wraps(step)
    def wrapper(self: Worker, *args: Any) -> Any:
        try:
            return step(self, *args)
        except BaseException:
            parallel_state.abort_model_parallel()
            raise

    return cast(F, wrapper)


class AsyncIntermediateTensors(IntermediateTensors):
    """Hidden states that the stage before has not sent yet, perhaps; whoever needs them waits."""

    __slots__ = ("_pp_group",)

    def __init__(self, buffers: IntermediateTensors, pp_group: GroupCoordinator) -> None:
        super().__init__(buffers.tensors)
        self._pp_group = pp_group

    def wait_for_comm(self) -> None:
        self._pp_group.recv_tensor_dict(self.tensors)


class Worker(WorkerBase):
    """A worker on a CPU or a CUDA GPU."""

    device: torch.device | None

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.platform: Platform = get_platform(vllm_config.device)
        self.init_snapshot = (0, 0)
        self._in_world = False
        self._runner: GPUModelRunnerV1 | GPUModelRunnerV2 | None = None
        self._pipeline_runner: GPUModelRunnerV1 | GPUModelRunnerV2 | None = None
        self._warm_up: Callable[[], list[str]]

    @property
    def model_runner(self) -> GPUModelRunnerV1 | GPUModelRunnerV2:
        if self._runner is None:
            raise RuntimeError(
                "the worker has no model runner: init_device has not run, or the worker is shut down"
            )
        return self._runner

    def init_device(self) -> None:
        """Bind the device, join the process groups, build the runner.

        Order matters:

        1. The device comes before the groups, since NCCL builds its communicator on the current device.
        2. The groups come before the memory snapshot, since NCCL's buffers must not count as free memory.
        3. Every rank has to be in here at the same time: the first collective waits for all of them.
        """
        parallel_config, model_config = self.parallel_config, self.model_config
        if model_config is None:
            raise ConfigError("this worker needs a model; the configuration has none")
        if torch.distributed.is_initialized():
            raise ConfigError(
                "this process runs a model already (or has process groups of its own), and there is room for one: call "
                "shutdown() of the other LLM first, or unset MINIVLLM_ENABLE_MULTIPROCESSING, and each gets a process of "
                "its own"
            )
        self._in_world = True
        with tracing.span("worker.init_device", device=self.vllm_config.device, rank=self.rank):
            with tracing.span("device.bind", local_rank=self.local_rank) as s:
                self.device = self.platform.bind_device(self.local_rank, parallel_config.local_world_size)
                s.set(device=str(self.device), threads=torch.get_num_threads())
                if hasattr(os, "sched_getaffinity"):
                    s.set(cores=str(sorted(os.sched_getaffinity(0))))
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                self.device,
                self.platform.dist_backend,
            )
            set_random_seed(model_config.seed)
            with tracing.span("device.memory_snapshot") as s:
                self.platform.empty_cache()
                self.init_snapshot = free, total = self.platform.get_memory_info()
                s.set(free_bytes=free, total_bytes=total)
            with tracing.span("runner.select") as s:
                decision = self.vllm_config.model_runner_decision
                s.set(
                    {
                        f"minivllm.stage.{stage.name}": f"{stage.answer}: {stage.why}"
                        for stage in decision.stages
                    },
                    runner="V2" if decision.use_v2 else "V1",
                    decided_by=decision.decided_by.name,
                    architecture=model_config.architecture,
                )
            self._init_model_runner(decision.use_v2)

    def _init_model_runner(self, use_v2: bool) -> None:
        """The one place where V1 and V2 part ways; only the one that is used is imported."""
        assert self.device is not None
        if use_v2:
            from minivllm.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
            from minivllm.worker.gpu.warmup import warm_up

            self._runner = runner = GPUModelRunnerV2(self.vllm_config, self.device)
            self._warm_up = functools.partial(warm_up, runner, self.execute_model, self.sample_tokens)
        else:
            from minivllm.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

            self._runner = runner_v1 = GPUModelRunnerV1(self.vllm_config, self.device)
            self._warm_up = runner_v1.warm_up
        if self.parallel_config.pipeline_parallel_size > 1:
            self._pipeline_runner = self._runner

    @_abort_peers_on_error
    @tracing.instrument("worker.load_model")
    def load_model(self) -> None:
        self.model_runner.load_model()

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        with tracing.span("worker.get_kv_cache_spec") as s:
            specs = self.model_runner.get_kv_cache_spec()
            s.set(layers=len(specs), bytes_per_block=sum(spec.page_size_bytes for spec in specs.values()))
            return specs

    @_abort_peers_on_error
    def determine_available_memory(self) -> int:
        """Bytes for this rank's KV cache, after a dummy forward pass that shows what the rest needs.

        On a CUDA GPU: the share of the memory that may be used, less weights, peak of the pass, and what others hold.
        On a CPU: the configured budget.

        Raises:
            ConfigError: nothing is left.
        """
        cache_config, max_num_tokens = self.cache_config, self.scheduler_config.max_num_batched_tokens
        with tracing.span("worker.determine_available_memory") as s:
            on_cpu = self.platform.device_type == "cpu"
            self.platform.reset_peak_memory()
            self.model_runner.profile_run(
                min(max_num_tokens, _CPU_PROFILE_TOKENS) if on_cpu else max_num_tokens
            )
            peak = self.platform.get_peak_memory()
            if cache_config.kv_cache_memory_bytes is not None:
                available, source = cache_config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
            elif peak is None:
                available, source = envs.MINIVLLM_CPU_KVCACHE_BYTES, "MINIVLLM_CPU_KVCACHE_BYTES"
            else:
                free, total = self.init_snapshot
                # What was in use before this rank loaded anything belongs to others and to NCCL.
                # Deviation from vLLM: it is subtracted. There only what grows outside of torch after the snapshot is;
                # what was in use before fails the start if less is free than gpu_memory_utilization asks for, and
                # is left to the part of the device that is not asked for.
                available = int(total * cache_config.gpu_memory_utilization) - (total - free) - peak
                source = f"gpu_memory_utilization={cache_config.gpu_memory_utilization:g}"
            s.set(available_bytes=available, source=source, peak_bytes=-1 if peak is None else peak)
            if available <= 0:
                raise ConfigError(
                    f"rank {self.rank}: no memory is left for the KV cache ({source} leaves {available} bytes); "
                    "raise gpu_memory_utilization or lower max_num_batched_tokens"
                )
            return available

    @_abort_peers_on_error
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    @_abort_peers_on_error
    def compile_or_warm_up_model(self) -> None:
        with tracing.span("runner.warm_up") as s:
            s.set(steps=", ".join(self._warm_up()))
        self.model_runner.capture_model()
        # Warm-up drew from torch's generator; a run must not depend on how much was warmed up.
        assert self.model_config is not None
        set_random_seed(self.model_config.seed)
        # What exists now lives as long as the worker. Looking through it again and again for garbage would cost
        # tens of milliseconds in the middle of a step.
        gc.freeze()

    @_abort_peers_on_error
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._pipeline_runner is not None:
            return self._execute_stage(self._pipeline_runner, scheduler_output)
        output = self.model_runner.execute_model(scheduler_output)
        assert not isinstance(output, IntermediateTensors)
        return output

    def _execute_stage(
        self, runner: GPUModelRunnerV1 | GPUModelRunnerV2, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | None:
        """Run this stage's layers, between receiving from the stage before and sending to the next.

        Receiving is left to the runner: it prepares its inputs while the stage before still computes.
        """
        pp_group = parallel_state.get_pp_group()
        intermediate_tensors = None
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens and runner.intermediate_tensors is not None:
            buffers = runner.intermediate_tensors.first(num_tokens)
            intermediate_tensors = AsyncIntermediateTensors(buffers, pp_group)
        output = runner.execute_model(scheduler_output, intermediate_tensors)
        if isinstance(output, IntermediateTensors):
            pp_group.send_tensor_dict(output.tensors)
            return None
        return output

    @_abort_peers_on_error
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    @_abort_peers_on_error
    def execute_dummy_batch(self) -> None:
        self.model_runner.execute_dummy_batch()

    def check_health(self) -> None:
        """Raises RuntimeError when init_device has not run or the worker is shut down."""
        assert self.model_runner is not None

    def set_device_of_thread(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def shutdown(self) -> None:
        """Drop runner and groups; idempotent, and right at any point of the start-up."""
        if self._runner is not None:
            self._runner.shutdown()
            self._runner = self._pipeline_runner = None
        # The groups of another worker, or of the caller, are theirs to destroy.
        if not self._in_world:
            return
        self._in_world = False
        with tracing.span("dist.destroy"):
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        gc.unfreeze()


def init_worker_distributed_environment(
    vllm_config: VllmConfig, rank: int, distributed_init_method: str, device: torch.device, backend: str
) -> None:
    """Meet the other ranks, then build the groups of the parallel dimensions."""
    parallel_config = vllm_config.parallel_config
    timeout_s = parallel_config.startup_timeout_s or envs.MINIVLLM_STARTUP_TIMEOUT_S
    parallel_state.init_distributed_environment(
        parallel_config.world_size,
        rank,
        distributed_init_method,
        device,
        backend,
        single_host=parallel_config.nnodes == 1,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        parallel_config.tensor_parallel_size,
        parallel_config.pipeline_parallel_size,
        max_token_bytes(vllm_config),
    )


def set_random_seed(seed: int) -> None:
    """Seed every generator that something on this rank might draw from."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
