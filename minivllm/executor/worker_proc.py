"""One worker's process: comes up, says READY, runs RPCs until it is told to end.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc)
Articles: part 1 §3, §4, part 2 §2.4
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from minivllm import envs, tracing
from minivllm.config import ParallelConfig, VllmConfig
from minivllm.distributed.shm_broadcast import Handle, MessageDecodeError, MessageQueue, MessageQueueClosed
from minivllm.executor.call import FAILURE, OUTPUT_FAILURE, SUCCESS
from minivllm.executor.death_pipe import DeathPipeMonitor
from minivllm.executor.leftovers import remove_leftovers
from minivllm.executor.orphan_alarm import arm_orphan_alarm
from minivllm.executor.remote_exception import RemoteException, describe_exception
from minivllm.executor.status_page import (
    DONE,
    EXECUTING,
    FAILURE_MASK,
    SEQUENCE_BITS,
    StatusPage,
    WorkerState,
)
from minivllm.executor.worker_handles import UnreadyWorkerProcHandle, WorkerProcHandle, closed_after_fork
from minivllm.executor.worker_startup import make_worker_process, startup_timeout_s, wait_for_ready
from minivllm.outputs import AsyncModelRunnerOutput
from minivllm.platforms import get_platform
from minivllm.utils.numa_utils import bind_to_numa_node
from minivllm.utils.system_utils import configure_logging, decorate_logs, set_process_title
from minivllm.worker.worker_base import WorkerWrapperBase

logger = logging.getLogger(__name__)
FAILED_EXIT_CODE = 1


class WorkerProc:
    """The child's half of the executor. Everything here runs in the worker process.

    Attributes:
        step: the start-up step that runs, for the FAILED message.
    """

    READY_STR: Final = "READY"
    FAILED_STR: Final = "FAILED"

    class ResponseStatus(Enum):
        """Second field of a response. On the wire it is the plain number."""

        SUCCESS = SUCCESS
        FAILURE = FAILURE
        OUTPUT_FAILURE = OUTPUT_FAILURE

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        input_shm_handle: Handle,
        is_driver_worker: bool,
        page: StatusPage,
        startup: StartupStep,
    ) -> None:
        """Build worker, device, model and queues, in this order.

        Invariants:
            1. Queues come after init_device: their readers take an open queue as the sign that the groups exist.
            2. The environment is frozen last; until then settings of the worker class may change it.
        """
        self.rank = rank
        self.vllm_config = vllm_config
        self.page = page
        self.rpc_broadcast_mq: MessageQueue | None = None
        self.worker_response_mq: MessageQueue | None = None
        self._output_queue: queue.SimpleQueue[Any] | None = None
        self._output_thread: threading.Thread | None = None
        parallel_config = vllm_config.parallel_config
        with tracing.span("worker.init", rank=rank, local_rank=local_rank, driver=is_driver_worker):
            startup.name = "worker.init_worker"
            self.worker = WorkerWrapperBase(rpc_rank=local_rank, global_rank=rank)
            all_kwargs: list[dict[str, Any]] = [{} for _ in range(parallel_config.world_size)]
            all_kwargs[local_rank] = {
                "vllm_config": vllm_config,
                "local_rank": local_rank,
                "rank": rank,
                "distributed_init_method": distributed_init_method,
                "is_driver_worker": is_driver_worker,
            }
            self.worker.init_worker(all_kwargs)
            setup_proc_title_and_log_prefix(parallel_config, rank, groups_exist=False)
            startup.name = "worker.init_device"
            self.worker.init_device()
            setup_proc_title_and_log_prefix(parallel_config, rank, groups_exist=True)
            startup.name = "worker.load_model"
            self.worker.load_model()
            startup.name = "worker.init_message_queues"
            self._init_message_queues(input_shm_handle)
            self.use_async_scheduling = vllm_config.scheduler_config.async_scheduling
            if self.use_async_scheduling:
                startup.name = "worker.start_async_output_thread"
                self._start_async_output_thread()
            with tracing.span("worker.enable_envs_cache"):
                envs.enable_envs_cache()

    def _init_message_queues(self, input_shm_handle: Handle) -> None:
        with tracing.span("worker.init_message_queues") as step:
            self.rpc_broadcast_mq = MessageQueue.create_from_handle(input_shm_handle, self.rank)
            self.worker_response_mq = MessageQueue(1, 1, name=f"response rank {self.rank}")
            step.set(broadcast=input_shm_handle.name, response=self.worker_response_mq.handle.name)

    def _start_async_output_thread(self) -> None:
        with tracing.span("worker.start_async_output_thread"):
            self._output_queue = queue.SimpleQueue()
            self._output_thread = threading.Thread(
                target=self.async_output_busy_loop, daemon=True, name="WorkerAsyncOutputCopy"
            )
            self._output_thread.start()

    # --- the loop ----------------------------------------------------------------------------------------------

    def worker_busy_loop(self) -> None:
        """Take RPCs and run them until the queues are closed.

        Invariants:
            1. Every RPC ends with one store to the status page, whether or not this rank replies, so the caller
               knows of a failure here even if it waits for another rank only.
            2. Nothing of an RPC (arguments, output, exception) is held while waiting for the next one.
            3. A message costs at most its own RPC: also one that cannot be unpickled, or whose output cannot be pickled.
        """
        assert self.rpc_broadcast_mq is not None
        self.page.set_state(self.rank, WorkerState.RUNNING)
        with tracing.span("worker.busy_loop", rank=self.rank) as span:
            try:
                self._run_loop(self.rpc_broadcast_mq.dequeue)
            except MessageQueueClosed as closed:
                span.set(ended=str(closed))

    def _run_loop(self, dequeue: Callable[..., Any]) -> None:
        words, rank = self.page.words, self.rank
        done, executing = self.page.index(rank, DONE), self.page.index(rank, EXECUTING)
        methods: dict[str | bytes, Callable[..., Any]] = {}
        number = failures = 0
        while True:
            method: str | bytes | None = "(unreadable request)"
            context = b""
            output = args = kwargs = func = None
            try:
                try:
                    number, method, args, kwargs, reply_rank, context = dequeue(indefinite=True)
                except MessageDecodeError:
                    # The executor numbers its messages without gaps, so the one that cannot be read is the next.
                    number += 1
                    raise
                words[executing] = number
                if method is None:
                    pass
                elif tracing.active:
                    self._execute_traced(methods, number, method, args, kwargs, reply_rank, context)
                else:
                    func = methods.get(method) or self._resolve_method(methods, method)
                    output = func(*args, **kwargs) if kwargs else func(*args)
                    if reply_rank is None or reply_rank == rank:
                        self.handle_output(number, output)
            except MessageQueueClosed:
                raise
            except Exception as error:
                failures = (failures + 1) & FAILURE_MASK
                self._report(number, method, error, context)
            words[done] = failures << SEQUENCE_BITS | number
            del output, args, kwargs, func, method

    def _resolve_method(
        self, methods: dict[str | bytes, Callable[..., Any]], method: str | bytes
    ) -> Callable[..., Any]:
        """A name is looked up once; a callable came by value and gets the worker as its first argument."""
        if isinstance(method, str):
            func: Callable[..., Any] = getattr(self.worker, method)
            methods[method] = func
            return func
        import cloudpickle

        # A callable may put other methods into the worker.
        methods.clear()
        return partial(cloudpickle.loads(method), self.worker)

    def _execute_traced(
        self,
        methods: dict[str | bytes, Callable[..., Any]],
        number: int,
        method: str | bytes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        reply_rank: int | None,
        context: bytes,
    ) -> None:
        replies = reply_rank is None or reply_rank == self.rank
        attrs = {"rpc.system.name": "minivllm", "rpc.method": _name_of(method)}
        with tracing.span(
            "rpc.execute", parent=context, attrs=attrs, seq=number, rank=self.rank, replies=replies
        ):
            with tracing.span("rpc.resolve_method", cached=method in methods):
                func = methods.get(method) or self._resolve_method(methods, method)
            output = func(*args, **kwargs) if kwargs else func(*args)
            if replies:
                with tracing.span("rpc.handle_output", seq=number, queued=self.use_async_scheduling):
                    self.handle_output(number, output)

    def _report(self, number: int, method: str | bytes | None, error: Exception, context: bytes) -> None:
        """Send an exception to the caller, from whichever rank."""
        described = describe_exception(error)
        name = _name_of(method)
        logger.info("%s (seq %d) raised\n%s", name, number, described.traceback)
        with tracing.span("worker.exception", parent=context, method=name, seq=number) as step:
            step.record_exception(error)
            self.handle_output(number, described)

    # --- output ------------------------------------------------------------------------------------------------

    def handle_output(self, number: int, output: Any) -> None:
        """Send an output, or with async scheduling have the output thread send it."""
        if self._output_queue is not None:
            self._output_queue.put((number, output, tracing.pack_context() if tracing.active else b""))
        else:
            self.enqueue_output(number, output)

    def enqueue_output(self, number: int, output: Any, context: bytes = b"") -> None:
        """Put the response into the ring, after waiting for an output that is still on its way from the device.

        Raises:
            Exception: the output cannot be computed or pickled; nothing was sent.
        """
        assert self.worker_response_mq is not None
        status = SUCCESS
        if isinstance(output, RemoteException):
            status, output = FAILURE, tuple(output)
        elif isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        if tracing.active:
            status_name = self.ResponseStatus(status).name
            with tracing.span("rpc.enqueue_output", parent=context, seq=number, status=status_name):
                self.worker_response_mq.enqueue((number, status, output))
        else:
            self.worker_response_mq.enqueue((number, status, output))

    def async_output_busy_loop(self) -> None:
        """Body of the output thread: send outputs in order, until the end is put into its queue.

        Deviation from vLLM: the thread has an end, an output that cannot be sent becomes an error response instead of
        the thread's death, and the last output is not kept.
        """
        assert self._output_queue is not None and self.worker_response_mq is not None
        worker = self.worker
        if worker.device is not None:
            # A thread starts out on device 0, and would make a second CUDA context there.
            parallel_config = self.vllm_config.parallel_config
            get_platform(self.vllm_config.device).bind_device(
                worker.local_rank, parallel_config.local_world_size
            )
        while (item := self._output_queue.get()) is not None:
            number, output, context = item
            try:
                self.enqueue_output(number, output, context)
            except MessageQueueClosed:
                return
            except Exception as error:
                described = describe_exception(error)
                self.worker_response_mq.enqueue((number, OUTPUT_FAILURE, tuple(described)))
            del item, output

    # --- the end -----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the queues, end the output thread, and have the worker give back runner and groups."""
        with tracing.span("worker.shutdown", rank=self.rank):
            for mq in (self.rpc_broadcast_mq, self.worker_response_mq):
                if mq is not None:
                    mq.shutdown()
            if self._output_queue is not None and self._output_thread is not None:
                self._output_queue.put(None)
                self._output_thread.join(1.0)
            self.worker.shutdown()

    # --- the process -------------------------------------------------------------------------------------------

    @staticmethod
    def make_worker_process(*args: Any, **kwargs: Any) -> UnreadyWorkerProcHandle:
        """Start one worker, see worker_startup.make_worker_process."""
        return make_worker_process(WorkerProc.worker_main, *args, **kwargs)

    @staticmethod
    def wait_for_ready(*args: Any, **kwargs: Any) -> list[WorkerProcHandle]:
        """Wait until all workers are ready, see worker_startup.wait_for_ready."""
        return wait_for_ready(*args, **kwargs)

    @staticmethod
    def worker_main(
        *,
        environment: dict[str, str],
        parent_pid: int,
        death_pipe: Connection,
        orphan_pipe: Connection,
        status_page: StatusPage,
        vllm_config: VllmConfig,
        rank: int,
        distributed_init_method: str,
        **kwargs: Any,
    ) -> None:
        """Entry point of a worker process.

        Invariants:
            1. The death pipe is watched from the first instruction on, before anything heavy is imported.
            2. Exactly one of READY and FAILED is sent, unless the process is ended from outside.
            3. The handshake has the executor's order, broadcast ring first; another order would deadlock.
        """
        # A fork server has the environment of the moment in which it was started.
        os.environ.update(environment)
        monitor = DeathPipeMonitor(
            death_pipe,
            orphan_grace_s=envs.MINIVLLM_WORKER_ORPHAN_GRACE_S,
            shutdown_grace_s=envs.MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S + envs.MINIVLLM_WORKER_SIGTERM_TIMEOUT_S,
            on_orphaned=partial(remove_leftovers, parent_pid),
        )
        arm_orphan_alarm(orphan_pipe.fileno(), max(1, math.ceil(envs.MINIVLLM_WORKER_ORPHAN_GRACE_S)))
        status_page.enter(rank)
        tracing.configure("worker", rank=rank, label=trace_label(vllm_config.parallel_config, rank))
        tracing.record_bootstrap("worker.bootstrap")
        status_page.set_state(rank, WorkerState.INITIALIZING)
        try:
            with tracing.span("worker.main", rank=rank):
                _WorkerMain(monitor, status_page, vllm_config, rank, distributed_init_method).run(**kwargs)
        finally:
            monitor.ended()
            tracing.shutdown()


class _WorkerMain:
    """What worker_main does, step by step."""

    def __init__(
        self,
        monitor: DeathPipeMonitor,
        page: StatusPage,
        vllm_config: VllmConfig,
        rank: int,
        distributed_init_method: str,
    ) -> None:
        self.monitor = monitor
        self.page = page
        self.vllm_config = vllm_config
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.startup = StartupStep()
        self.worker: WorkerProc | None = None
        self._ending = False

    def run(
        self,
        ready_pipe: Connection,
        local_rank: int,
        input_shm_handle: Handle,
        is_driver_worker: bool,
        numa_node: int | None,
    ) -> None:
        ready = False
        try:
            self._prepare(numa_node)
            worker = self.worker = WorkerProc(
                self.vllm_config,
                local_rank,
                self.rank,
                self.distributed_init_method,
                input_shm_handle,
                is_driver_worker,
                self.page,
                self.startup,
            )
            assert worker.rpc_broadcast_mq is not None and worker.worker_response_mq is not None
            self.startup.name = "worker.send_ready"
            with tracing.span("worker.send_ready", status=WorkerProc.READY_STR):
                ready_pipe.send(
                    {"status": WorkerProc.READY_STR, "handle": worker.worker_response_mq.export_handle()}
                )
                ready = True
            self.page.set_state(self.rank, WorkerState.READY)
            # A queue that is attached to the monitor cannot keep this process waiting after its parent's end.
            self.monitor.attach(worker.rpc_broadcast_mq.shutdown)
            self.monitor.attach(worker.worker_response_mq.shutdown)
            with tracing.span("worker.mq_handshake"):
                limit = startup_timeout_s(self.vllm_config.parallel_config)
                worker.rpc_broadcast_mq.wait_until_ready(limit)
                worker.worker_response_mq.wait_until_ready(limit)
            ready_pipe.close()
            worker.worker_busy_loop()
        except MessageQueueClosed:
            # The parent closed the pipe before the loop began.
            pass
        except BaseException as error:
            if ready or self._ending:
                raise
            self._send_failed(ready_pipe, error)
            # The parent tells the user; a second traceback from here would only be in the way.
            raise SystemExit(FAILED_EXIT_CODE) from None
        finally:
            self._ending = True
            self.page.set_state(self.rank, WorkerState.ENDING)
            if self.worker is not None:
                self.worker.shutdown()

    def _prepare(self, numa_node: int | None) -> None:
        with tracing.span("worker.install_signal_handlers"):
            # Deviation from vLLM: SIGINT is ignored. Ctrl-C goes to the whole process group; the parent decides what
            # it means, and an executor in a notebook outlives an interrupted call.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if descriptors := closed_after_fork():
            with tracing.span(
                "worker.close_inherited_fds",
                descriptors=descriptors,
                why="a copy of a parent's pipe end would hide its EOF from the child that reads it",
            ):
                # Closed already, in the fork itself: later there would be a moment in which the copies exist.
                pass
        with tracing.span("worker.monitor_death_pipe", thread=self.monitor.thread_name):
            # It has been running since the first instruction.
            pass
        configure_logging()
        if numa_node is not None:
            bind_to_numa_node(numa_node)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            # Only in a forked worker. The parent's OpenMP threads do not exist here, but the OpenMP runtime believes
            # they do and would wait for them.
            torch.set_num_threads(1)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        # Deviation from vLLM: the death pipe does not switch this off, so a worker that is busy can be ended politely.
        if not self._ending:
            self._ending = True
            raise SystemExit(128 + signum)

    def _send_failed(self, ready_pipe: Connection, error: BaseException) -> None:
        described = describe_exception(error)
        logger.info("failed to start in %s\n%s", self.startup.name, described.traceback)
        with tracing.span("worker.send_ready", status=WorkerProc.FAILED_STR, step=self.startup.name):
            try:
                ready_pipe.send(
                    {
                        "status": WorkerProc.FAILED_STR,
                        "step": self.startup.name,
                        "exception": tuple(described),
                    }
                )
            except OSError:
                pass  # the parent is gone


class StartupStep:
    """The step of the start-up that runs; what FAILED names."""

    def __init__(self) -> None:
        self.name = "worker.main"


def setup_proc_title_and_log_prefix(parallel_config: ParallelConfig, rank: int, groups_exist: bool) -> None:
    """Name this process `minivllm::Worker`, and `minivllm::Worker_PP0_TP1` once the groups exist."""
    name = "Worker"
    if groups_exist:
        name += "".join(
            f"_{dimension}{number}" for dimension, number in _parallel_ranks(parallel_config, rank)
        )
    with tracing.span("worker.set_process_title", title=name):
        set_process_title(name)
        decorate_logs(name)


def trace_label(parallel_config: ParallelConfig, rank: int) -> str:
    """Short name of a worker in traces: "tp1", "pp0.tp1"."""
    numbers = _parallel_ranks(parallel_config, rank) or [("TP", 0)]
    return ".".join(f"{dimension.lower()}{number}" for dimension, number in numbers)


def _parallel_ranks(parallel_config: ParallelConfig, rank: int) -> list[tuple[str, int]]:
    """This rank's number in each dimension with more than one rank: pipeline stages are blocks of consecutive ranks."""
    tp_size, pp_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
    numbers = []
    if pp_size > 1:
        numbers.append(("PP", rank // tp_size))
    if tp_size > 1:
        numbers.append(("TP", rank % tp_size))
    return numbers


def _name_of(method: str | bytes | None) -> str:
    return method if isinstance(method, str) else "a callable"
