"""Ending the workers and giving back what an executor took: politely, then firmly, and always.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.shutdown, _ensure_worker_termination)
Articles: part 2 §2.3.8, §2.3.9
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # its exit hook must be registered before ours, to run after it
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from minivllm import envs, tracing
from minivllm.distributed.shm_broadcast import MessageQueue
from minivllm.executor.rpc import RpcChannel
from minivllm.executor.status_page import RankStatus, StatusPage, WorkerState
from minivllm.executor.worker_handles import UnreadyWorkerProcHandle, parent_end
from minivllm.utils.network_utils import Rendezvous
from minivllm.utils.system_utils import ended_by_signal, explain_exit

# Twice this is what a caller waits for its error when a start-up fails while another rank is stuck in a rendezvous.
_HURRY_S = 0.15
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class TerminationLimits:
    """Seconds that each level of ending a worker may take.

    Attributes:
        graceful_s: after the request through the death pipe.
        sigterm_s: after SIGTERM.
        sigkill_s: after SIGKILL; only a process stuck in the kernel needs more than a moment.
    """

    graceful_s: float
    sigterm_s: float
    sigkill_s: float = 5.0

    @classmethod
    def from_envs(cls) -> TerminationLimits:
        return cls(envs.MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S, envs.MINIVLLM_WORKER_SIGTERM_TIMEOUT_S)

    def hurried(self) -> TerminationLimits:
        """After a failure nobody waits for a worker that is busy with what cannot succeed any more."""
        return replace(
            self, graceful_s=min(self.graceful_s, _HURRY_S), sigterm_s=min(self.sigterm_s, _HURRY_S)
        )


def ensure_worker_termination(handles: Sequence[UnreadyWorkerProcHandle], limits: TerminationLimits) -> None:
    """Return when all these processes are gone and reaped: wait, then SIGTERM, then SIGKILL."""
    with tracing.span("executor.terminate_graceful", limit_s=limits.graceful_s) as step:
        left = wait_for_termination(handles, limits.graceful_s)
        step.set(left=[handle.rank for handle in left])
    if left:
        with tracing.span(
            "executor.terminate_sigterm", ranks=[h.rank for h in left], limit_s=limits.sigterm_s
        ):
            for handle in left:
                handle.proc.terminate()
            left = wait_for_termination(left, limits.sigterm_s)
    if left:
        with tracing.span("executor.terminate_sigkill", ranks=[handle.rank for handle in left]):
            _kill(left, limits.sigkill_s)


def wait_for_termination(
    handles: Sequence[UnreadyWorkerProcHandle], timeout_s: float
) -> list[UnreadyWorkerProcHandle]:
    """Those that are still alive after at most `timeout_s`."""
    patience = tracing.Patience(timeout_s)
    while left := [handle for handle in handles if not handle.has_ended()]:
        remaining = patience.left()
        if remaining <= 0:
            break
        # A process that the worker started may hold the sentinel's other end, so it is not the only thing to go by.
        wait([handle.proc.sentinel for handle in left], min(remaining, _LOOK_EVERY_S))
    return left


def _kill(handles: Sequence[UnreadyWorkerProcHandle], timeout_s: float) -> None:
    for handle in handles:
        handle.proc.kill()
    wait_for_termination(handles, timeout_s)


class ExecutorResources:
    """Everything that an executor has to give back, and the one way to do it.

    The executor's finalizer, the monitor thread and the exit hook hold this object and never the executor, so a
    forgotten executor is collected and its workers end.

    Invariants:
        1. The cause of a failure is noted before anything else happens; callers are released before workers are ended.
        2. Workers are ended once, whoever asks and how often; every caller of `shutdown` returns after that is done.
        3. Only the process that made the executor does any of it. A forked child that exits leaves it alone.

    Deviation from vLLM: `weakref.finalize(self, self.shutdown)` keeps the executor alive there; callers wait until
    the time for ending the other workers is used up; nothing stops two threads from shutting down at once; and a
    killed worker stays a zombie.

    Attributes:
        handles: all workers that were started.
        failure: why the executor cannot go on; "" while it can.
        wake_reader: readable when the monitor has something to look at besides the sentinels.
        orphan_reader: the workers' end of a pipe that nobody writes: EOF is this process's death.
    """

    def __init__(self) -> None:
        self.limits = TerminationLimits.from_envs()
        self.handles: list[UnreadyWorkerProcHandle] = []
        self.queues: list[MessageQueue] = []
        self.channel: RpcChannel | None = None
        self.page: StatusPage | None = None
        self.rendezvous: Rendezvous | None = None
        self.monitor: threading.Thread | None = None
        self.failure = ""
        self._owner_pid = os.getpid()
        self._claims: dict[str, tuple[int, object]] = {}
        self._finished = threading.Event()
        self.wake_reader, self._wake_writer = map(parent_end, multiprocessing.Pipe(duplex=False))
        self.orphan_reader, writer = multiprocessing.Pipe(duplex=False)
        self._orphan_writer = parent_end(writer)
        _live.add(self)

    @property
    def shutting_down(self) -> bool:
        return "shutdown" in self._claims

    def _claim(self, what: str) -> tuple[bool, int]:
        """Whether this call is the first that claims `what`, and the thread of the first.

        Not a lock: a signal handler or a finalizer may come while its own thread is in here.
        """
        token = object()
        thread, first = self._claims.setdefault(what, (threading.get_ident(), token))
        return first is token, thread

    # --- failure -----------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> bool:
        """Declare the executor failed and release every caller. False when it has failed or is ending already."""
        if self.shutting_down or not self._claim("failure")[0]:
            return False
        self.failure = reason
        self._close_queues(reason)
        self._wake_monitor()
        return True

    def find_dead(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a worker to end; fail when one has. Returns whether the executor has failed."""
        if self.failure or self.shutting_down:
            return True
        handles = self.handles
        try:
            if timeout_s > 0:
                wait([handle.proc.sentinel for handle in handles], timeout_s)
            dead = [handle for handle in handles if handle.has_ended()]
        except (ValueError, OSError):
            # Closed by a shutdown in another thread.
            return self.shutting_down
        if not dead or self.shutting_down:
            return self.shutting_down
        # A signal is a cause; an exit code may be the effect of another worker's death.
        dead.sort(key=lambda handle: (not ended_by_signal(handle.exitcode), handle.rank))
        if self.fail("; ".join(map(self.describe_death, dead))):
            with tracing.span(
                "monitor.worker_died",
                rank=dead[0].rank,
                pid=dead[0].pid,
                exitcode=dead[0].exitcode,
                reason=self.failure,
            ) as step:
                step.error(self.failure)
        return True

    def describe_death(self, handle: UnreadyWorkerProcHandle) -> str:
        """Which worker, how it ended, and what it was doing."""
        status, channel = self.status(handle.rank), self.channel
        text = f"{handle.name} {explain_exit(handle.exitcode)} in {status.step}"
        if status.executing and channel is not None:
            text += f" while executing {channel.report.method_of(status.executing)} (seq {status.executing})"
        return text

    def status(self, rank: int) -> RankStatus:
        """What a rank is or was doing, with the pid the parent knows when the child has not said so yet."""
        if self.page is None:
            return RankStatus(rank, 0, WorkerState.STARTING, (), 0, 0)
        status = self.page.status(rank)
        if status.pid == 0 and rank < len(self.handles):
            status = replace(status, pid=self.handles[rank].pid)
        return status

    # --- the end -----------------------------------------------------------------------------------------------

    def shutdown(self, hurried: bool = False) -> None:
        """End the workers and give everything back (invariants 2 and 3). After a failure it is always in a hurry."""
        if os.getpid() != self._owner_pid:
            return
        first, thread = self._claim("shutdown")
        if not first:
            # The thread that is at it may come here again, from a callback or a signal handler; it must not wait.
            # And the thread that is at it waits for the monitor.
            if thread != threading.get_ident() and threading.current_thread() is not self.monitor:
                self._finished.wait()
            return
        limits = self.limits.hurried() if hurried or self.failure else self.limits
        try:
            with tracing.span("executor.shutdown", failure=self.failure or None):
                self._end_workers(limits)
        finally:
            # After an interrupt there is no more patience, but nothing stays behind.
            _kill([handle for handle in self.handles if not handle.has_ended()], self.limits.sigkill_s)
            self._release()
            self._finished.set()
            _live.discard(self)

    def _end_workers(self, limits: TerminationLimits) -> None:
        handles = self.handles
        self._close_queues(self.failure or "the executor has been shut down")
        self._wake_monitor()
        with tracing.span("executor.close_death_writers", ranks=[handle.rank for handle in handles]):
            for handle in handles:
                handle.close_death_writer()
        ensure_worker_termination(handles, limits)
        with tracing.span("executor.close_message_queues", queues=len(self.queues)):
            for queue in self.queues:
                queue.shutdown()

    def _close_queues(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close(reason)
        for queue in self.queues:
            queue.shutdown(reason)

    def _release(self) -> None:
        for handle in self.handles:
            handle.ready_pipe.close()
        if self.monitor is not None and self.monitor is not threading.current_thread():
            patience = tracing.Patience(1.0)
            while self.monitor.is_alive() and (left := patience.left()) > 0:
                self.monitor.join(min(left, _LOOK_EVERY_S))
        for connection in (self.wake_reader, self._wake_writer, self.orphan_reader, self._orphan_writer):
            connection.close()
        # These refer to each other in a circle; without it their memory goes as soon as nobody uses it.
        for queue in self.queues:
            queue.on_wait = None
        self.channel = None
        if self.page is not None:
            self.page.close_descriptor()
        if self.rendezvous is not None:
            self.rendezvous.remove()
        for handle in self.handles:
            if handle.has_ended():
                handle.proc.close()

    def _wake_monitor(self) -> None:
        try:
            self._wake_writer.send_bytes(b"\0")
        except OSError:
            pass


_live: weakref.WeakSet[ExecutorResources] = weakref.WeakSet()


def _shutdown_all() -> None:
    """At interpreter exit, before multiprocessing's own hook, which would wait for ever for a worker that is stuck."""
    for resources in list(_live):
        resources.shutdown()


atexit.register(_shutdown_all)
