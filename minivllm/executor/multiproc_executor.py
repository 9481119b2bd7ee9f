"""The executor with one process per rank: brings the workers up, calls methods on them, and notices when one dies.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor, FutureWrapper, WorkerProc)
Articles: part 1 §2, part 2 §2.3
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.distributed.shm_broadcast import MessageQueue, MessageQueueClosed
from minivllm.distributed.shm_sizes import naming_the_whole_need
from minivllm.exceptions import ConfigError, WorkerStartupError
from minivllm.executor.abstract import Executor, FailureCallback, KVOutputAggregator, ProgressCallback
from minivllm.executor.call import PendingCall
from minivllm.executor.future import FutureWrapper
from minivllm.executor.rpc import RpcChannel
from minivllm.executor.status_page import RankStatus, StatusPage
from minivllm.executor.termination import ExecutorResources, ensure_worker_termination
from minivllm.executor.worker_handles import UnreadyWorkerProcHandle, WorkerProcHandle
from minivllm.executor.worker_monitor import monitor_workers
from minivllm.executor.worker_proc import WorkerProc
from minivllm.executor.worker_startup import startup_timeout_s
from minivllm.utils.network_utils import Rendezvous
from minivllm.utils.omp_utils import worker_omp_threads
from minivllm.utils.system_utils import MPContext, check_main_guard, get_mp_context

__all__ = [
    "FutureWrapper",
    "MultiprocExecutor",
    "UnreadyWorkerProcHandle",
    "WorkerProc",
    "WorkerProcHandle",
    "set_multiprocessing_worker_envs",
]


class MultiprocExecutor(Executor):
    """One broadcast ring to all workers, one response ring from each of them.

    After an exception in a method the executor goes on. When a rank stays inside a call that has failed on another
    rank (a collective that nobody will complete), or a worker dies, the executor has failed: every call raises
    ExecutorFailedError with the cause, and a new executor has to be made.

    Attributes:
        world_size: ranks in all.
        local_world_size: ranks on this node.
        workers: handles of the workers, by local rank.
        rpc_broadcast_mq: ring to all workers.
        response_mqs: `[world_size]` rings from the workers.
    """

    supports_pp: ClassVar[bool] = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        on_progress: ProgressCallback | None = None,
        monitor_workers: bool = True,
    ) -> None:
        """
        Args:
            monitor_workers: watch the workers from a thread. False: call start_worker_monitor(inline=True) yourself;
                until then a death is noticed by the calls that wait for it.
        """
        check_main_guard()
        self.monitor_workers = monitor_workers
        super().__init__(vllm_config, on_progress)

    # --- coming up ---------------------------------------------------------------------------------------------

    def _init_executor(self) -> None:
        """
        Invariants:
            1. The finalizer exists before anything that would have to be given back.
            2. All workers are started before any is waited for: each of them waits for the others in init_device.
            3. The monitor watches before the handshake, so a worker that dies in it ends the wait.
            4. The handshake has the workers' order, broadcast ring first. With the response rings first, both sides would
               wait to be told that their readers are seen, and neither would tell.
        """
        self._callback_lock = threading.Lock()
        self._failure_callback: FailureCallback | None = None
        self._failure_announced = False
        self._resources = ExecutorResources()
        self._finalizer = weakref.finalize(self, ExecutorResources.shutdown, self._resources)
        try:
            self._start_workers()
        except BaseException:
            self._resources.shutdown(hurried=True)
            raise

    def _start_workers(self) -> None:
        resources = self._resources
        tp_size, pp_size, pcp_size = self._get_parallel_sizes()
        assert self.world_size == tp_size * pp_size * pcp_size
        context = set_multiprocessing_worker_envs(self.vllm_config)
        with tracing.span("executor.distributed_init_method") as step:
            resources.rendezvous = Rendezvous()
            distributed_init_method = resources.rendezvous.distributed_init_method
            step.set(method=distributed_init_method)
        with tracing.span("executor.create_broadcast_mq") as step:
            with naming_the_whole_need(self.vllm_config):
                self.rpc_broadcast_mq = MessageQueue(
                    self.world_size, self.local_world_size, name="rpc broadcast"
                )
            resources.queues.append(self.rpc_broadcast_mq)
            input_shm_handle = self.rpc_broadcast_mq.export_handle()
            step.set(readers=self.world_size, handle=str(input_shm_handle.buffer_handle))
        page = resources.page = StatusPage(self.world_size)
        with tracing.span("executor.spawn_workers", world_size=self.world_size):
            for rank in range(self.local_world_size):
                resources.handles.append(
                    WorkerProc.make_worker_process(
                        context=context,
                        vllm_config=self.vllm_config,
                        local_rank=rank,
                        rank=rank,
                        distributed_init_method=distributed_init_method,
                        input_shm_handle=input_shm_handle,
                        is_driver_worker=self._is_driver_worker(rank),
                        page=page,
                        orphan_pipe=resources.orphan_reader,
                    )
                )
        resources.orphan_reader.close()
        # Whoever listens knows the processes from now on, whatever becomes of this one.
        self._report_progress()
        limit_s = startup_timeout_s(self.parallel_config)
        self.workers = WorkerProc.wait_for_ready(
            resources, list(resources.handles), limit_s, self._report_progress
        )
        page.close_descriptor()
        if self.monitor_workers:
            self.start_worker_monitor()
        with tracing.span("executor.collect_response_mqs", ranks=[handle.rank for handle in self.workers]):
            self.response_mqs = [
                handle.worker_response_mq for handle in self.workers if handle.worker_response_mq is not None
            ]
            resources.queues.extend(self.response_mqs)
        self._handshake(limit_s)
        self._post_init_executor(page)

    def _get_parallel_sizes(self) -> tuple[int, int, int]:
        parallel_config = self.parallel_config
        with tracing.span("executor.parallel_sizes") as step:
            if parallel_config.nnodes > 1:
                raise ConfigError(f"nnodes={parallel_config.nnodes}: several nodes are not supported yet")
            self.world_size = parallel_config.world_size
            self.local_world_size = parallel_config.local_world_size
            sizes = (
                parallel_config.tensor_parallel_size,
                parallel_config.pipeline_parallel_size,
                parallel_config.prefill_context_parallel_size,
            )
            step.set(
                tp=sizes[0],
                pp=sizes[1],
                pcp=sizes[2],
                world_size=self.world_size,
                local_world_size=self.local_world_size,
                nnodes=parallel_config.nnodes,
            )
        return sizes

    def _is_driver_worker(self, rank: int) -> bool:
        return rank % self.parallel_config.tensor_parallel_size == 0

    def _handshake(self, limit_s: float) -> None:
        with tracing.span("executor.mq_handshake"):
            try:
                for queue in (self.rpc_broadcast_mq, *self.response_mqs):
                    queue.on_wait = self._handshake_check(self._resources)
                    queue.wait_until_ready(limit_s)
                    queue.on_wait = None
            except MessageQueueClosed:
                raise WorkerStartupError(f"{self._resources.failure} during start-up") from None

    @staticmethod
    def _handshake_check(resources: ExecutorResources) -> Callable[[], None]:
        def check() -> None:
            if resources.find_dead(0):
                raise MessageQueueClosed(resources.failure)

        return check

    def _post_init_executor(self, page: StatusPage) -> None:
        with tracing.span("executor.post_init") as step:
            self.output_rank = self._get_output_rank()
            self._rpc = RpcChannel(
                self.rpc_broadcast_mq,
                self.response_mqs,
                page,
                self._resources.find_dead,
                self._resources.fail,
                envs.MINIVLLM_WORKER_STUCK_TIMEOUT_S,
            )
            self._resources.channel = self._rpc
            self._rpc.responses.on_wait = partial(_report_progress, weakref.ref(self))
            step.set(output_rank=self.output_rank, max_concurrent_batches=self.max_concurrent_batches)
        if self._resources.failure:
            raise WorkerStartupError(f"{self._resources.failure} during start-up")

    def _get_output_rank(self) -> int:
        """First rank of the last pipeline stage: world 8, tp 2, pp 4 gives 6."""
        config = self.parallel_config
        return self.world_size - config.tensor_parallel_size * config.prefill_context_parallel_size

    # --- watching ----------------------------------------------------------------------------------------------

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers from a thread, or with `inline` in the calling one, until the executor ends."""
        announce = partial(_announce_failure, weakref.ref(self))
        with tracing.span("executor.start_worker_monitor", workers=len(self.workers), inline=inline):
            if not inline:
                monitor = threading.Thread(
                    target=monitor_workers,
                    args=(self._resources, announce),
                    daemon=True,
                    name="MultiprocWorkerMonitor",
                )
                monitor.start()
                self._resources.monitor = monitor
                return
        monitor_workers(self._resources, announce)

    @property
    def is_failed(self) -> bool:
        return bool(self._resources.failure)

    def register_failure_callback(self, callback: FailureCallback) -> None:
        # Deviation from vLLM: under a lock. There the monitor may look for a callback between the check and the store.
        with self._callback_lock:
            announced = self._failure_announced
            if not announced:
                self._failure_callback = callback
        if announced:
            with tracing.span("executor.failure_callback", registered="after the failure"):
                callback()

    def _call_failure_callback(self) -> None:
        with self._callback_lock:
            self._failure_announced = True
            callback, self._failure_callback = self._failure_callback, None
        if callback is not None:
            with tracing.span("executor.failure_callback", registered="before the failure"):
                callback()

    def status_snapshot(self) -> list[RankStatus]:
        return [self._resources.status(rank) for rank in range(self.world_size)]

    def _report_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.status_snapshot())

    # --- calling -----------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: KVOutputAggregator | None = None,
    ) -> Any:
        if tracing.calls:
            return self._collective_rpc_traced(
                method, timeout, args, kwargs, non_block, unique_reply_rank, kv_output_aggregator
            )
        call = self._submit(method, timeout, args, kwargs, unique_reply_rank, kv_output_aggregator, b"")
        if non_block:
            return FutureWrapper(self._rpc, call)
        return self._rpc.result(call)

    def _submit(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        unique_reply_rank: int | None,
        kv_output_aggregator: KVOutputAggregator | None,
        context: bytes,
    ) -> PendingCall:
        aggregate = None
        if kv_output_aggregator is not None:
            aggregate = partial(kv_output_aggregator.aggregate, output_rank=unique_reply_rank or 0)
            unique_reply_rank = None
        if isinstance(method, str):
            return self._rpc.submit(
                method, method, timeout, args, kwargs, unique_reply_rank, aggregate, context
            )
        label = getattr(method, "__name__", type(method).__name__)
        with tracing.span("rpc.serialize_method", method=label) as step:
            import cloudpickle

            serialized: bytes = cloudpickle.dumps(method, protocol=pickle.HIGHEST_PROTOCOL)
            step.set(bytes=len(serialized))
        return self._rpc.submit(
            serialized, label, timeout, args, kwargs, unique_reply_rank, aggregate, context
        )

    def _collective_rpc_traced(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        non_block: bool,
        unique_reply_rank: int | None,
        kv_output_aggregator: KVOutputAggregator | None,
    ) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
        replies = "all" if unique_reply_rank is None or kv_output_aggregator else f"rank {unique_reply_rank}"
        attrs = {
            "replies": replies,
            "timeout_s": timeout,
            "non_block": non_block,
            "rpc.system.name": "minivllm",
            "rpc.method": name,
        }
        with tracing.hot_span("rpc.call", attrs) as span:
            call = self._submit(
                method, timeout, args, kwargs, unique_reply_rank, kv_output_aggregator, span.context
            )
            attrs["seq"] = call.sequence
            if non_block:
                return FutureWrapper(self._rpc, call)
            with tracing.hot_span("rpc.await_responses", {"seq": call.sequence, "ranks": list(call.ranks)}):
                return self._rpc.result(call)

    # --- going down --------------------------------------------------------------------------------------------

    _ensure_worker_termination = staticmethod(ensure_worker_termination)

    def shutdown(self, hurried: bool = False) -> None:
        """Release every caller, ask the workers to end, and end those that do not."""
        self._resources.shutdown(hurried)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


# What threads and queues hold: it must not keep a forgotten executor alive.


def _report_progress(executor_ref: weakref.ref[MultiprocExecutor]) -> None:
    executor = executor_ref()
    if executor is not None:
        executor._report_progress()


def _announce_failure(executor_ref: weakref.ref[MultiprocExecutor]) -> None:
    executor = executor_ref()
    if executor is not None:
        executor._call_failure_callback()


def set_multiprocessing_worker_envs(vllm_config: VllmConfig) -> MPContext:
    """Settle how workers are started and with how many OpenMP threads; the environment itself is not changed.

    Deviation from vLLM: the number of threads goes into the environment of the workers only, not of this process.

    Raises:
        ConfigError: the start method cannot be used here.
    """
    with tracing.span("executor.set_worker_envs") as step:
        context = get_mp_context()
        threads = worker_omp_threads(vllm_config.device, vllm_config.parallel_config.local_world_size)
        step.set(start_method=context.get_start_method(), omp_num_threads=threads or "set by the user")
    return context
