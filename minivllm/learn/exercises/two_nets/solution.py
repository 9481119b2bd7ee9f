"""Two facts have two flags.

"An end is wanted" and "the end has begun" are different for as long as the worker is busy. The handler must know the
second one: it may interrupt everything but the clean-up.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.monitor_death_pipe, worker_main)
Articles: part 2 §2.3.8, §2.4.7, §2.4.8
"""

import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType


class WorkerMain:
    """What runs around a worker's loop.

    Attributes:
        shutdown_requested: the loop should return when it comes by.
        ending: the clean-up has begun, or is about to; nothing may interrupt it.
    """

    def __init__(self, death_pipe: Connection) -> None:
        self.death_pipe = death_pipe
        self.shutdown_requested = threading.Event()
        self.ending = False

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
            self.ending = True
            clean_up()

    def watch_death_pipe(self) -> None:
        """In a thread: wait for the parent to close its end of the pipe."""
        try:
            self.death_pipe.recv_bytes()
        except EOFError:
            self.shutdown_requested.set()

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.ending:
            self.ending = True
            raise SystemExit(0)
