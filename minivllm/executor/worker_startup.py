"""Starting workers and waiting until each of them is ready or has said why not.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.make_worker_process, wait_for_ready)
Articles: part 2 §2.4.3, §2.4.4, §2.4.5
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from minivllm import envs, tracing
from minivllm.config import ParallelConfig, VllmConfig
from minivllm.distributed.shm_broadcast import Handle, MessageQueue
from minivllm.exceptions import (
    ConfigError,
    RemoteError,
    WorkerConfigError,
    WorkerStartupError,
    WorkerStartupTimeout,
)
from minivllm.executor.status_page import LEAVE_S, StatusPage, WorkerState
from minivllm.executor.worker_handles import UnreadyWorkerProcHandle, WorkerProcHandle, parent_end
from minivllm.tracing.context import environment as set_environment
from minivllm.utils import ownership
from minivllm.utils.numa_utils import choose_numa_node, numa_nodes
from minivllm.utils.omp_utils import worker_omp_threads
from minivllm.utils.system_utils import (
    MAIN_GUARD_ERROR,
    MAIN_GUARD_EXIT_CODE,
    MPContext,
    undisturbed_start,
)

if TYPE_CHECKING:
    from minivllm.executor.termination import ExecutorResources

READY_STR = "READY"
FAILED_STR = "FAILED"

_PROGRESS_EVERY_S = 0.1
# A worker that fails takes others down; a moment later the pipes show who else has failed, and why.
_OTHERS_S = 0.05

# os.environ is one per process: executors that start in several threads take turns with it.
_start_lock = threading.Lock()


def startup_timeout_s(parallel_config: ParallelConfig) -> float:
    """Seconds that all workers together have to become ready."""
    configured = parallel_config.startup_timeout_s
    limit: float = envs.MINIVLLM_STARTUP_TIMEOUT_S if configured is None else configured
    return limit


def make_worker_process(
    context: MPContext,
    vllm_config: VllmConfig,
    local_rank: int,
    rank: int,
    distributed_init_method: str,
    input_shm_handle: Handle,
    is_driver_worker: bool,
    page: StatusPage,
    orphan_pipe: Connection,
) -> UnreadyWorkerProcHandle:
    """Start one worker and do not wait for it.

    Its two pipes go one way each: ready from child to parent, death from parent to child. The parent closes its
    copies of the child's ends at once, so that the child's death shows as EOF.
    """
    from minivllm.executor.worker_proc import WorkerProc

    parallel_config = vllm_config.parallel_config
    with tracing.span("executor.make_worker_process", rank=rank, driver=is_driver_worker) as step:
        ready_reader, ready_writer = context.Pipe(duplex=False)
        death_reader, death_writer = context.Pipe(duplex=False)
        parent_end(ready_reader)
        parent_end(death_writer)
        life = tracing.start_span("worker.process", rank=rank)
        numa_node = None
        if parallel_config.numa_bind:
            numa_node = choose_numa_node(local_rank, parallel_config.local_world_size, numa_nodes())
        try:
            with _start_lock:
                variables = _child_variables(vllm_config, life.context)
                proc = context.Process(
                    target=WorkerProc.worker_main,
                    kwargs={
                        "environment": variables,
                        "parent_pid": os.getpid(),
                        "numa_node": numa_node,
                        "vllm_config": vllm_config,
                        "local_rank": local_rank,
                        "rank": rank,
                        "distributed_init_method": distributed_init_method,
                        "input_shm_handle": input_shm_handle,
                        "is_driver_worker": is_driver_worker,
                        "ready_pipe": ready_writer,
                        "death_pipe": death_reader,
                        "status_page": page,
                        "orphan_pipe": orphan_pipe,
                    },
                    name=f"Worker-{rank}",
                    # Ended by multiprocessing when the parent leaves in order and for some reason did not shut down.
                    daemon=True,
                )
                with set_environment(variables), undisturbed_start(context):
                    proc.start()
                ownership.remain_the_parents(proc)
        except BaseException as error:
            life.record_exception(error)
            life.end()
            ready_reader.close()
            death_writer.close()
            raise
        finally:
            ready_writer.close()
            death_reader.close()
        step.set({"process.pid": proc.pid}, start_method=context.get_start_method(), numa_node=numa_node)
        life.set({"process.pid": proc.pid})
        return UnreadyWorkerProcHandle(proc, rank, ready_reader, death_writer, life)


def _child_variables(vllm_config: VllmConfig, trace_parent: bytes) -> dict[str, str]:
    """Environment of a worker: ours, its number of OpenMP threads, and its place in the trace."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("MINIVLLM_")}
    threads = worker_omp_threads(vllm_config.device, vllm_config.parallel_config.local_world_size)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    variables.update(tracing.child_variables(trace_parent or None))
    return variables


def wait_for_ready(
    resources: ExecutorResources,
    handles: list[UnreadyWorkerProcHandle],
    limit_s: float,
    on_progress: Callable[[], None] | None = None,
) -> list[WorkerProcHandle]:
    """Wait until every worker is ready; the answer is in rank order.

    Raises:
        WorkerStartupError: a worker failed or died; names rank and step, and carries the worker's traceback.
        WorkerStartupTimeout: names the ranks that are missing and the step each of them is in.
    """
    patience = tracing.Patience(limit_s)
    pipes: dict[Connection, UnreadyWorkerProcHandle] = {handle.ready_pipe: handle for handle in handles}
    ready: dict[int, WorkerProcHandle] = {}
    with tracing.span("executor.wait_for_ready", limit_s=limit_s) as step:
        while pipes:
            remaining = patience.left()
            if remaining <= 0:
                raise _startup_timeout(resources, list(pipes.values()), limit_s)
            for pipe in wait(list(pipes), min(remaining, _PROGRESS_EVERY_S)):
                assert isinstance(pipe, Connection)
                handle = pipes.pop(pipe)
                message = _receive(pipe)
                if message is None or message["status"] != READY_STR:
                    raise _startup_failure(resources, handle, message, pipes)
                pipe.close()
                step.event("ready", rank=handle.rank, pid=handle.pid)
                ready[handle.rank] = connected = wait_for_response_handle_ready(message["handle"], handle)
                resources.handles[resources.handles.index(handle)] = connected
            # A worker that has sent READY may still die before all others are ready.
            for connected in ready.values():
                if connected.has_ended():
                    raise WorkerStartupError(resources.describe_death(connected) + " during start-up")
            if on_progress is not None:
                on_progress()
    return [ready[rank] for rank in sorted(ready)]


def wait_for_response_handle_ready(
    handle: Handle, unready_handle: UnreadyWorkerProcHandle
) -> WorkerProcHandle:
    """Open the response ring that came with READY."""
    with tracing.span("executor.connect_response_mq", rank=unready_handle.rank, queue=handle.name):
        return WorkerProcHandle.from_unready_handle(
            unready_handle, MessageQueue.create_from_handle(handle, 0)
        )


def _receive(pipe: Connection) -> dict[str, Any] | None:
    """The message in a ready pipe; None when the worker has died without one."""
    try:
        message: dict[str, Any] = pipe.recv()
    except (EOFError, OSError):
        return None
    return message


def _startup_failure(
    resources: ExecutorResources,
    handle: UnreadyWorkerProcHandle,
    message: dict[str, Any] | None,
    pipes: dict[Connection, UnreadyWorkerProcHandle],
) -> WorkerStartupError:
    """The error that matters, when the first worker has failed and perhaps taken others down.

    A worker that was killed explains others that fail; the other way round it does not. Otherwise the first counts.
    """
    errors = [_describe_failure(resources, handle, message)]
    patience = tracing.Patience(_OTHERS_S)
    while pipes:
        leaving = [
            pipe for pipe, other in pipes.items() if resources.status(other.rank).state == WorkerState.ENDING
        ]
        if patience.left() + (LEAVE_S if leaving else 0) <= 0:
            break
        for pipe in wait(list(pipes), _OTHERS_S):
            assert isinstance(pipe, Connection)
            message, other = _receive(pipe), pipes.pop(pipe)
            if message is None or message["status"] != READY_STR:
                errors.append(_describe_failure(resources, other, message))
    errors.sort(key=lambda error: error[0])
    first = errors[0][1]
    if sys.version_info >= (3, 11):
        for _, other in errors[1:]:
            if str(other) != str(first):
                first.add_note(f"also: {str(other).splitlines()[0]}")
    return first


def _describe_failure(
    resources: ExecutorResources, handle: UnreadyWorkerProcHandle, message: dict[str, Any] | None
) -> tuple[bool, WorkerStartupError]:
    """Whether the failure may be another one's effect, and the error."""
    if message is not None:
        name, text, stack = message["exception"]
        # Only the worker reads the weights, so it is the first to see a damaged checkpoint.
        refused = name.rpartition(".")[2] == ConfigError.__name__
        error = (WorkerConfigError if refused else WorkerStartupError)(
            f"{handle.name} failed to start in {message['step']}: {text if refused else f'{name}: {text}'}\n"
            f"--- traceback on rank {handle.rank} ---\n{stack.rstrip()}"
        )
        error.__cause__ = RemoteError(handle.rank, message["step"], name, text, stack)
        return True, error
    # The pipe is closed a moment before the process can be waited for.
    handle.proc.join(1.0)
    handle.has_ended()
    if handle.exitcode == MAIN_GUARD_EXIT_CODE:
        return False, WorkerStartupError(f"worker processes cannot start: {MAIN_GUARD_ERROR}")
    return False, WorkerStartupError(resources.describe_death(handle) + " during start-up")


def _startup_timeout(
    resources: ExecutorResources, missing: list[UnreadyWorkerProcHandle], limit_s: float
) -> WorkerStartupTimeout:
    where = ", ".join(
        f"rank {handle.rank} (pid {handle.pid}) is in {resources.status(handle.rank).step}"
        for handle in missing
    )
    return WorkerStartupTimeout(
        f"start-up took longer than {limit_s:g} s (startup_timeout_s, MINIVLLM_STARTUP_TIMEOUT_S): {where}"
    )
