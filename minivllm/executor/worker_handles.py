"""The parent's view of its worker processes: what it holds of one before and after READY, and how one ended.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (UnreadyWorkerProcHandle, WorkerProcHandle)
Articles: part 2 §2.2
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from minivllm import tracing
from minivllm.distributed.shm_broadcast import MessageQueue
from minivllm.executor.death_pipe import request_shutdown
from minivllm.executor.leftovers import remove_leftovers
from minivllm.utils.system_utils import explain_exit

# Pipe ends that belong to this process alone. A forked child that kept a copy would hide the EOF that they signal.
# Deviation from vLLM: one list for all executors of the process, and it works for children that somebody else forks.
_parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
_closed_after_fork: list[int] = []


def parent_end(connection: Connection) -> Connection:
    """Have every forked child close its copy of this connection."""
    _parent_ends.add(connection)
    return connection


def _close_parent_ends() -> None:
    _closed_after_fork.clear()
    for connection in list(_parent_ends):
        if not connection.closed:
            _closed_after_fork.append(connection.fileno())
            connection.close()
    _parent_ends.clear()


def closed_after_fork() -> list[int]:
    """Descriptors of the parent's pipe ends that this process closed when it was forked."""
    return _closed_after_fork.copy()


os.register_at_fork(after_in_child=_close_parent_ends)


@dataclass(eq=False)
class UnreadyWorkerProcHandle:
    """A worker that has been started and has not said READY.

    Attributes:
        ready_pipe: from the worker: READY or FAILED, once.
        death_writer: to the worker: its closing is the polite request to end; None once that was made.
        life: the span of the process's whole life.
        exitcode: as multiprocessing has it, negative for a signal; None while it lives.
    """

    proc: BaseProcess
    rank: int
    ready_pipe: Connection
    death_writer: Connection | None
    life: tracing.Span
    pid: int = 0
    exitcode: int | None = field(default=None)

    def __post_init__(self) -> None:
        self.pid = self.proc.pid or 0

    @property
    def name(self) -> str:
        return f"worker rank {self.rank} (pid {self.pid})"

    def close_death_writer(self) -> None:
        """Ask the worker to end."""
        writer, self.death_writer = self.death_writer, None
        if writer is not None:
            request_shutdown(writer)

    def has_ended(self) -> bool:
        """Whether the process is gone; if so it is reaped, its span ended, and what it left removed."""
        if self.exitcode is None:
            self.exitcode = self.proc.exitcode
            if self.exitcode is not None:
                self.life.set({"process.exit.code": self.exitcode}, ended=explain_exit(self.exitcode))
                if self.exitcode:
                    self.life.error(explain_exit(self.exitcode))
                    remove_leftovers(self.pid)
                self.life.end()
        return self.exitcode is not None


@dataclass(eq=False)
class WorkerProcHandle(UnreadyWorkerProcHandle):
    """A worker that is ready.

    Attributes:
        worker_response_mq: the ring that this worker writes and the executor reads.
    """

    worker_response_mq: MessageQueue | None = None

    @classmethod
    def from_unready_handle(
        cls, unready_handle: UnreadyWorkerProcHandle, worker_response_mq: MessageQueue
    ) -> WorkerProcHandle:
        """The same worker, ready. The unready handle gives its pipe up."""
        writer, unready_handle.death_writer = unready_handle.death_writer, None
        return cls(
            proc=unready_handle.proc,
            rank=unready_handle.rank,
            ready_pipe=unready_handle.ready_pipe,
            death_writer=writer,
            life=unready_handle.life,
            worker_response_mq=worker_response_mq,
        )
