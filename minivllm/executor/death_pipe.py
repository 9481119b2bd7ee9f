"""The worker's end of the death pipe: a child ends when its parent asks for it, or when the parent is no more.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.monitor_death_pipe)
Articles: part 2 §2.4.7, §4.3

The parent holds the only writing end. Before it closes that end on purpose it writes one byte, so the child can tell
a shutdown (byte, then EOF) from the parent's death (EOF alone).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from minivllm import tracing

SHUTDOWN_BYTE = b"\x01"
ORPHAN_EXIT_CODE = 1
PARENT_DIED = "parent died"
SHUTDOWN_REQUESTED = "shutdown requested"


def request_shutdown(death_writer: Connection) -> None:
    """In the parent: ask the child to end, politely. The child may be gone already."""
    try:
        death_writer.send_bytes(SHUTDOWN_BYTE)
    except OSError:
        pass
    death_writer.close()


class DeathPipeMonitor:
    """A thread that waits at the death pipe for as long as the process lives.

    1. It runs from the child's first instruction, so a parent that dies while the model is being loaded is noticed.
    2. It wakes the process by closing what the process waits on (`attach`), and a thing that is attached after the
       pipe has fired is closed at once: no order of events leaves the process waiting.
    3. When the process has not ended by itself after the grace time, the thread ends it, whatever it is doing.

    Deviation from vLLM: there the thread starts after the model is loaded, and only sets a flag and wakes the queue;
    a worker inside a call outlives its parent, and the flag turns the SIGTERM handler off.

    Attributes:
        reason: why the pipe fired: "" (it has not), SHUTDOWN_REQUESTED or PARENT_DIED.
    """

    def __init__(
        self,
        death_pipe: Connection,
        orphan_grace_s: float,
        shutdown_grace_s: float,
        on_orphaned: Callable[[], object],
    ) -> None:
        """Starts the thread.

        Args:
            orphan_grace_s: time to end after the parent's death.
            shutdown_grace_s: time to end after a request; the parent enforces its own, shorter limits.
            on_orphaned: gives back what the dead parent can no longer give back.
        """
        self._death_pipe = death_pipe
        self._grace_s = {PARENT_DIED: orphan_grace_s, SHUTDOWN_REQUESTED: shutdown_grace_s}
        self._on_orphaned = on_orphaned
        self._lock = threading.Lock()
        self._closers: list[Callable[[], object]] = []
        self._handled = threading.Event()
        self.reason = ""
        self.thread_name = "minivllm-death-pipe"
        threading.Thread(target=self._watch, name=self.thread_name, daemon=True).start()

    def attach(self, close: Callable[[], object]) -> None:
        """Have `close` called when the pipe fires; now, if it has fired."""
        with self._lock:
            if not self.reason:
                self._closers.append(close)
                return
        close()

    def wait_until_handled(self) -> None:
        """When the pipe has fired: wait for the thread to have closed everything, so that its step is in the trace."""
        if self.reason:
            self._handled.wait(0.2)

    def _watch(self) -> None:
        reason = _wait_at(self._death_pipe)
        try:
            with tracing.span("worker.parent_died", reason=reason):
                with self._lock:
                    self.reason = reason
                    closers, self._closers = self._closers, []
                for close in closers:
                    close()
                if reason == PARENT_DIED:
                    self._on_orphaned()
        finally:
            self._handled.set()
            patience = tracing.Patience(self._grace_s[reason])
            while (left := patience.left()) > 0:
                time.sleep(left)
            # Not sys.exit: that would end this thread only, and the main thread may be in a call for ever.
            os._exit(ORPHAN_EXIT_CODE)


def _wait_at(death_pipe: Connection) -> str:
    try:
        death_pipe.recv_bytes()
    except (EOFError, OSError):
        return PARENT_DIED
    return SHUTDOWN_REQUESTED
