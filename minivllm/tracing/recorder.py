"""What a process has recorded: its files, and for live exports a thread that sleeps while nothing happens.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: none
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm.tracing.files import TraceFiles

if TYPE_CHECKING:
    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
DRAIN_INTERVAL_S = 0.2
CHUNK_SPANS = 128
THREAD_NAME = "minivllm-trace"

Sink = Callable[["list[Span]"], None]


class Recorder:
    """One per process.

    Attributes:
        finished: spans that have ended and that the sinks do not have yet; appended to by any thread, never replaced.
        open: spans that have started and not ended, by span id; those of the hot path are only on their thread's stack.
        idle: True while the thread sleeps without a deadline.
        files: the trace files, when the run has a directory.
        sinks: takers of finished spans besides the files; never replaced.
    """

    def __init__(self) -> None:
        self.finished: list[Span] = []
        self.open: dict[int, Span] = {}
        self.idle = True
        self.files: TraceFiles | None = None
        self.sinks: list[Sink] = []
        self._warned = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.lock = threading.RLock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.idle = True

    def give_on(self, item: Span) -> None:
        """Hand a span that has ended to the sinks."""
        if self.sinks:
            self.finished.append(item)
            if self.idle:
                self._wake_thread()

    def _wake_thread(self) -> None:
        self.idle = False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down: shutdown() writes the rest
                return
            self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        stop, wake = self._stop, self._wake
        while True:
            wake.wait()
            wake.clear()
            if stop.wait(DRAIN_INTERVAL_S):
                return
            if self.hand_on(polite=True):
                wake.set()
                continue
            # Set before the second look: a span appended between the two is seen by one side or the other.
            self.idle = True
            if self.finished:
                self.idle = False
                wake.set()

    def drain(self) -> None:
        """Have everything that has been written so far with the sinks, and as OTLP/JSON in the file."""
        self.hand_on()
        with self.lock:
            if self.files is not None:
                self.files.write()

    def hand_on(self, polite: bool = False) -> int:
        """Give everything that has ended to the sinks; returns how many spans. polite: let other threads run in between."""
        total = 0
        while self.finished:
            with self.lock:
                chunk = self.finished[:CHUNK_SPANS]
                del self.finished[: len(chunk)]
                try:
                    for sink in self.sinks:
                        sink(chunk)
                except Exception:
                    # Whatever a span carries must not end this thread: the run goes on without these spans.
                    if not self._warned:
                        self._warned = True
                        logger.exception("%d spans could not be exported", len(chunk))
            total += len(chunk)
            if polite:
                time.sleep(0)
        return total

    def stop(self) -> None:
        """End the thread and hand on what is left; recording may start again later."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self.hand_on()
        self._start_afresh()

    def forget(self) -> None:
        """In a forked child: drop the parent's spans, files and thread without touching them."""
        self.open.clear()
        self.finished.clear()
        if self.files is not None:
            self.files.abandon()
            self.files = None
        self._start_afresh()


recorder = Recorder()
