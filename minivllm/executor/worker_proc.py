"""One worker's process: comes up, says READY, runs RPCs until it is told to end.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc)
Articles: part 1 §3, §4, part 2 §2.4
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.distributed.shm_broadcast import Handle, MessageDecodeError, MessageQueue, MessageQueueClosed
from minivllm.distributed.shm_sizes import naming_the_whole_need
from minivllm.executor import by_value
from minivllm.executor.call import FAILURE, OUTPUT_FAILURE, SUCCESS, SUCCESS_BY_VALUE
from minivllm.executor.remote_exception import RemoteException, describe_exception
from minivllm.executor.status_page import (
    DONE,
    EXECUTING,
    FAILURE_MASK,
    SEQUENCE_BITS,
    StatusPage,
    WorkerState,
)
from minivllm.executor.worker_main import StartupStep, worker_main
from minivllm.executor.worker_names import setup_proc_title_and_log_prefix
from minivllm.executor.worker_startup import (
    FAILED_STR,
    READY_STR,
    make_worker_process,
    wait_for_ready,
    wait_for_response_handle_ready,
)
from minivllm.outputs import AsyncModelRunnerOutput
from minivllm.platforms import get_platform
from minivllm.utils.system_utils import yield_core
from minivllm.worker.worker_base import WorkerWrapperBase

logger = logging.getLogger(__name__)


class WorkerProc:
    """The child's half of the executor: what runs in the worker process."""

    READY_STR: Final = READY_STR
    FAILED_STR: Final = FAILED_STR

    class ResponseStatus(Enum):
        """Second field of a response. On the wire it is the plain number."""

        SUCCESS = SUCCESS
        FAILURE = FAILURE
        OUTPUT_FAILURE = OUTPUT_FAILURE
        SUCCESS_BY_VALUE = SUCCESS_BY_VALUE

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
            # Deviation from vLLM: the output thread starts when the queue that it writes to exists, not before.
            self.use_async_scheduling = vllm_config.scheduler_config.async_scheduling
            if self.use_async_scheduling:
                startup.name = "worker.start_async_output_thread"
                self._start_async_output_thread()
            with tracing.span("worker.enable_envs_cache"):
                envs.enable_envs_cache()

    def _init_message_queues(self, input_shm_handle: Handle) -> None:
        with tracing.span("worker.init_message_queues") as step:
            self.rpc_broadcast_mq = MessageQueue.create_from_handle(input_shm_handle, self.rank)
            with naming_the_whole_need(self.vllm_config):
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
            except BaseException:
                # No error of the method's, which _run_loop reports: sys.exit() in it, for one.
                self.page.begin_end(self.rank)
                raise

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
                elif tracing.calls:
                    self._execute_traced(methods, number, method, args, kwargs, reply_rank, context)
                else:
                    func = methods.get(method) or self._resolve_method(methods, method)
                    output = func(*args, **kwargs) if kwargs else func(*args)
                    if reply_rank is None or reply_rank == rank:
                        self.handle_output(number, output)
            except Exception as error:
                if isinstance(error, MessageQueueClosed) and self._is_closed():
                    raise
                failures = (failures + 1) & FAILURE_MASK
                self._report(number, method, error, context)
            words[done] = failures << SEQUENCE_BITS | number
            del output, args, kwargs, func, method
            # With fewer cores than processes the caller, or another rank, may be waiting for this core; polling the
            # ring first would keep it waiting.
            yield_core()

    def _is_closed(self) -> bool:
        """Whether our own queues are closed; a method may use, and lose, others."""
        assert self.rpc_broadcast_mq is not None and self.worker_response_mq is not None
        return self.rpc_broadcast_mq.shutting_down or self.worker_response_mq.shutting_down

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
        attrs = {
            "seq": number,
            "rank": self.rank,
            "replies": replies,
            "rpc.system.name": "minivllm",
            "rpc.method": _name_of(method),
        }
        with tracing.hot_span("rpc.execute", attrs, context):
            if tracing.messages:
                with tracing.hot_span("rpc.resolve_method", {"cached": method in methods}):
                    func = methods.get(method) or self._resolve_method(methods, method)
            else:
                func = methods.get(method) or self._resolve_method(methods, method)
            output = func(*args, **kwargs) if kwargs else func(*args)
            if replies:
                with tracing.hot_span(
                    "rpc.handle_output", {"seq": number, "queued": self.use_async_scheduling}
                ):
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
            self._output_queue.put((number, output, tracing.pack_context() if tracing.calls else b""))
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
        if tracing.calls:
            # Asking the Enum would cost more than the span.
            status_name = "SUCCESS" if status == SUCCESS else "FAILURE"
            with tracing.hot_span(
                "rpc.enqueue_output", {"seq": number, "status": status_name}, context
            ) as span:
                try:
                    self.worker_response_mq.enqueue((number, status, output))
                except by_value.CANNOT_PICKLE as error:
                    self._enqueue_by_value(number, status, output, error)
                    span.set(status="SUCCESS_BY_VALUE")
                except MessageQueueClosed as closed:
                    # The worker was told to end, and nobody waits for the answer: no failure of the steps around this
                    # one. The loop meets the closed queue itself.
                    span.set(ended_by=type(closed).__name__)
        else:
            try:
                self.worker_response_mq.enqueue((number, status, output))
            except by_value.CANNOT_PICKLE as error:
                self._enqueue_by_value(number, status, output, error)

    def _enqueue_by_value(self, number: int, status: int, output: Any, error: Exception) -> None:
        """Send what pickle could not take, which has cost nothing until it was tried. Raises `error` if nothing can."""
        assert self.worker_response_mq is not None
        if status != SUCCESS:
            raise error
        try:
            response = number, SUCCESS_BY_VALUE, by_value.dumps(output)
        except Exception:
            raise error from None
        self.worker_response_mq.enqueue(response)

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
        try:
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
        except MessageQueueClosed:
            return
        except BaseException:
            # Without this thread the worker looks healthy and answers nothing.
            logger.exception("the output thread of rank %d has failed", self.rank)
            os._exit(1)

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

    make_worker_process = staticmethod(make_worker_process)
    wait_for_ready = staticmethod(wait_for_ready)
    wait_for_response_handle_ready = staticmethod(wait_for_response_handle_ready)

    @staticmethod
    def worker_main(**kwargs: Any) -> None:
        """Entry point of a worker process, see worker_main.worker_main."""
        worker_main(WorkerProc, **kwargs)


def _name_of(method: str | bytes | None) -> str:
    return method if isinstance(method, str) else "a callable"
