"""The executor without processes: one worker, called directly.

vLLM 0.25.1: vllm/v1/executor/uniproc_executor.py (UniProcExecutor, AsyncOutputFuture)
Articles: part 2 §1.3
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from minivllm import tracing
from minivllm.exceptions import ConfigError, ExecutorFailedError
from minivllm.executor.abstract import Executor, FailureCallback, KVOutputAggregator
from minivllm.executor.status_page import RankStatus, WorkerState
from minivllm.outputs import AsyncModelRunnerOutput
from minivllm.utils import ownership
from minivllm.utils.network_utils import Rendezvous
from minivllm.worker.worker_base import WorkerWrapperBase


class AsyncOutputFuture(Future[Any]):
    """Waits for an output that is still on its way from the device when somebody asks for it."""

    def __init__(self, output: AsyncModelRunnerOutput, as_list: bool) -> None:
        super().__init__()
        self._output: AsyncModelRunnerOutput | None = output
        self._as_list = as_list

    def result(self, timeout: float | None = None) -> Any:
        """The output. `timeout` cannot interrupt a copy from the device, which takes no longer than the step."""
        output, self._output = self._output, None
        if output is not None:
            try:
                value = output.get_output()
                self.set_result([value] if self._as_list else value)
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class UniProcExecutor(Executor):
    """Runs the worker in the calling process and thread. Exceptions are the worker's own, not RemoteError."""

    def _init_executor(self) -> None:
        if self.parallel_config.world_size != 1:
            raise ConfigError(f"UniProcExecutor runs one rank, not {self.parallel_config.world_size}")
        self._closed = False
        self._owner = ownership.Owner()
        rendezvous = Rendezvous()
        self.driver_worker = WorkerWrapperBase(rpc_rank=0)
        self._finalizer = weakref.finalize(self, _shut_down, self.driver_worker, rendezvous, os.getpid())
        try:
            self.driver_worker.init_worker(
                [
                    {
                        "vllm_config": self.vllm_config,
                        "local_rank": 0,
                        "rank": 0,
                        "distributed_init_method": rendezvous.distributed_init_method,
                        "is_driver_worker": True,
                    }
                ]
            )
            self._report("worker.init_device")
            self.driver_worker.init_device()
            self._report("worker.load_model")
            self.driver_worker.load_model()
        except BaseException:
            self._finalizer()
            raise

    def _report(self, step: str) -> None:
        if self.on_progress is not None:
            self.on_progress([RankStatus(0, os.getpid(), WorkerState.INITIALIZING, (step,), 0, 0)])

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
        """As Executor.collective_rpc. A time limit cannot interrupt the caller's own thread and is ignored."""
        as_list = unique_reply_rank is None and kv_output_aggregator is None
        if not non_block:
            return self._call(method, args, kwargs, as_list, kv_output_aggregator)
        future: Future[Any] = Future()
        try:
            output = self._run(method, args, kwargs)
            if isinstance(output, AsyncModelRunnerOutput) and kv_output_aggregator is None:
                return AsyncOutputFuture(output, as_list)
            future.set_result(_finish(output, as_list, kv_output_aggregator))
        except Exception as error:
            future.set_exception(error)
        return future

    def _call(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        as_list: bool,
        aggregator: KVOutputAggregator | None,
    ) -> Any:
        return _finish(self._run(method, args, kwargs), as_list, aggregator)

    def _run(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        # The worker's OpenMP threads, and its CUDA context, do not exist in a forked child.
        if self._owner.generation != ownership.generation:
            raise ExecutorFailedError(self._owner.refusal("executor"))
        if self._closed:
            raise ExecutorFailedError("the executor has been shut down")
        name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
        attrs = {"rpc.system.name": "minivllm", "rpc.method": name}
        with tracing.span("rpc.call", attrs=attrs), tracing.span("rpc.execute", attrs=attrs, rank=0):
            if isinstance(method, str):
                return self.driver_worker.execute_method(method, *args, **(kwargs or {}))
            return method(self.driver_worker, *args, **(kwargs or {}))

    @property
    def is_failed(self) -> bool:
        return False

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Never called: this executor ends with the process that it is in."""

    def check_health(self) -> None:
        """As healthy as the process that asks."""

    def status_snapshot(self) -> list[RankStatus]:
        return [RankStatus(0, os.getpid(), WorkerState.RUNNING, (), 0, 0)]

    def shutdown(self, hurried: bool = False) -> None:
        self._closed = True
        if self._finalizer.alive:
            with tracing.span("executor.shutdown"):
                self._finalizer()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


def _finish(output: Any, as_list: bool, aggregator: KVOutputAggregator | None) -> Any:
    if isinstance(output, AsyncModelRunnerOutput):
        output = output.get_output()
    if aggregator is not None:
        with tracing.span("rpc.aggregate"):
            return aggregator.aggregate([output], output_rank=0)
    return [output] if as_list else output


def _shut_down(worker: WorkerWrapperBase, rendezvous: Rendezvous, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child that exits
    with tracing.span("worker.shutdown", rank=0):
        worker.shutdown()
    rendezvous.remove()
