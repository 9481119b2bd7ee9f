"""The entry point of a worker process: what happens around WorkerProc, from the first instruction to the last.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.worker_main)
Articles: part 1 §3, part 2 §2.4.7, §2.4.8
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from minivllm import envs, tracing
from minivllm.config import VllmConfig
from minivllm.distributed.shm_broadcast import Handle, MessageQueueClosed
from minivllm.executor.death_pipe import DeathPipeMonitor
from minivllm.executor.leftovers import remove_leftovers
from minivllm.executor.orphan_alarm import arm_orphan_alarm
from minivllm.executor.remote_exception import describe_exception
from minivllm.executor.status_page import StatusPage, WorkerState
from minivllm.executor.worker_handles import closed_after_fork
from minivllm.executor.worker_names import trace_label
from minivllm.executor.worker_startup import FAILED_STR, READY_STR, startup_timeout_s
from minivllm.utils.numa_utils import bind_to_numa_node
from minivllm.utils.system_utils import (
    configure_logging,
    find_place_of_title,
    leave_terminal_signals_to_parent,
)

if TYPE_CHECKING:
    from minivllm.executor.worker_proc import WorkerProc

logger = logging.getLogger(__name__)
FAILED_EXIT_CODE = 1
_PARENT_FIRST_S = 1.0


def worker_main(
    worker_proc_class: type[WorkerProc],
    *,
    environment: dict[str, str],
    parent_pid: int,
    death_pipe: Connection,
    orphan_pipe: Connection,
    status_page: StatusPage,
    vllm_config: VllmConfig,
    rank: int,
    distributed_init_method: str,
    ready_pipe: Connection,
    **kwargs: Any,
) -> None:
    """Entry point of a worker process.

    Invariants:
        1. The death pipe is watched from the first instruction on, before anything heavy is imported.
        2. Exactly one of READY and FAILED is sent, unless the process is ended from outside.
        3. The handshake has the executor's order, broadcast ring first; see MultiprocExecutor._init_executor.
    """
    find_place_of_title()
    # A fork server has the environment of the moment in which it was started.
    os.environ.update(environment)
    monitor = DeathPipeMonitor(
        death_pipe,
        orphan_grace_s=envs.MINIVLLM_WORKER_ORPHAN_GRACE_S,
        # Somewhat more than the parent's own limits: it is to end this process, and to say so.
        shutdown_grace_s=envs.MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S
        + envs.MINIVLLM_WORKER_SIGTERM_TIMEOUT_S
        + _PARENT_FIRST_S,
        on_orphaned=partial(remove_leftovers, parent_pid),
    )
    arm_orphan_alarm(orphan_pipe.fileno(), max(1, math.ceil(envs.MINIVLLM_WORKER_ORPHAN_GRACE_S)))
    status_page.enter(rank)
    code = 0
    try:
        try:
            tracing.configure("worker", rank=rank, label=trace_label(vllm_config.parallel_config, rank))
            tracing.record_bootstrap("worker.bootstrap")
        except Exception as error:
            # The disk may have no room for the trace.
            _send_failed(ready_pipe, "worker.bootstrap", error)
            raise SystemExit(FAILED_EXIT_CODE) from None
        status_page.set_state(rank, WorkerState.INITIALIZING)
        with tracing.span("worker.main", rank=rank):
            _WorkerMain(
                worker_proc_class, monitor, status_page, vllm_config, rank, distributed_init_method
            ).run(ready_pipe, **kwargs)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    monitor.wait_until_handled()
    _leave(code)


def _send_failed(ready_pipe: Connection, step: str, error: BaseException) -> None:
    described = describe_exception(error)
    logger.info("failed to start in %s\n%s", step, described.traceback)
    with tracing.span("worker.send_ready", status=FAILED_STR, step=step):
        try:
            ready_pipe.send({"status": FAILED_STR, "step": step, "exception": tuple(described)})
        except OSError:
            pass  # the parent is gone


def _leave(code: int) -> None:
    """End the process without taking the interpreter apart.

    With torch loaded that takes a second of computing, and gives back nothing that the kernel does not. Exit handlers
    do not run either: in a forked worker they are the parent's, whose files they would remove.
    """
    try:
        tracing.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(code)


class _WorkerMain:
    """What worker_main does, step by step."""

    def __init__(
        self,
        worker_proc_class: type[WorkerProc],
        monitor: DeathPipeMonitor,
        page: StatusPage,
        vllm_config: VllmConfig,
        rank: int,
        distributed_init_method: str,
    ) -> None:
        self._worker_proc_class = worker_proc_class
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
            worker = self.worker = self._worker_proc_class(
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
            with tracing.span("worker.send_ready", status=READY_STR):
                ready_pipe.send({"status": READY_STR, "handle": worker.worker_response_mq.export_handle()})
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
            _send_failed(ready_pipe, self.startup.name, error)
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
            # it means, and an executor in a notebook outlives an interrupted call. The same holds for SIGHUP.
            leave_terminal_signals_to_parent()
            signal.signal(signal.SIGTERM, self._on_sigterm)
        with tracing.span("worker.monitor_death_pipe", thread=self.monitor.thread_name):
            # It has been running since the first instruction.
            pass
        if descriptors := closed_after_fork():
            self._prepare_forked(descriptors)
        configure_logging()
        if numa_node is not None:
            bind_to_numa_node(numa_node)

    def _prepare_forked(self, descriptors: list[int]) -> None:
        with tracing.span(
            "worker.close_inherited_fds",
            descriptors=descriptors,
            why="a copy of a parent's pipe end would hide its EOF from the child that reads it",
        ):
            # Closed already, in the fork itself: later there would be a moment in which the copies exist.
            pass
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            # The parent's OpenMP threads do not exist here, but the OpenMP runtime believes they do and would wait
            # for them.
            torch.set_num_threads(1)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        # Deviation from vLLM: the death pipe does not switch this off, so a worker that is busy can be ended politely.
        if self._ending:
            # The time for cleaning up is over.
            os._exit(128 + signum)
        self._ending = True
        # Before anything is unwound: other ranks notice that, and their errors may be there before this process is gone.
        self.page.begin_end(self.rank)
        raise SystemExit(128 + signum)


class StartupStep:
    """The step of the start-up that runs; what FAILED names."""

    def __init__(self) -> None:
        self.name = "worker.main"
