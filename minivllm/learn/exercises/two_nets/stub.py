"""Two safety nets that cancel each other.

A worker has two ways to be ended. When its parent closes the death pipe, a thread asks the loop to stop. On SIGTERM, the
handler raises SystemExit, once only, since a second one in the middle of the clean-up would do harm.

Each is right alone. Together they are not: a worker that is busy when the pipe closes can then only be killed. Find out
why, and repair it without giving up what either of them is for.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.monitor_death_pipe, worker_main)
Articles: part 2 §2.3.8, §2.4.7, §2.4.8
"""

import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType


class WorkerMain:
    """What runs around a worker's loop."""

    def __init__(self, death_pipe: Connection) -> None:
        self.death_pipe = death_pipe
        self.shutdown_requested = threading.Event()

    def run(self, serve: Callable[[threading.Event], None], clean_up: Callable[[], None]) -> None:
        """Serve until somebody wants an end, then clean up.

        Args:
            serve: the loop; looks at the event between two calls, and returns when it is set.
            clean_up: gives back what the worker has; must run to its end, once.
        """
        signal.signal(signal.SIGTERM, self.on_sigterm)
        threading.Thread(target=self.watch_death_pipe, daemon=True).start()
        try:
            serve(self.shutdown_requested)
        finally:
            clean_up()

    def watch_death_pipe(self) -> None:
        """In a thread: wait for the parent to close its end of the pipe."""
        try:
            self.death_pipe.recv_bytes()
        except EOFError:
            self.shutdown_requested.set()

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.shutdown_requested.is_set():
            self.shutdown_requested.set()
            raise SystemExit(0)
