"""The files of one process in the trace directory: spool, start journal, table of open spans, and OTLP/JSON at the end.

vLLM 0.25.1: none
Articles: none

`<role>-<pid>.spool` is the Spool: spans that have ended. `<role>-<pid>.jsonl` holds OTLP/JSON, one {"resourceSpans": …}
a line: at a flush and at the end it gets what the spool has, and the spool goes. `<role>-<pid>.journal.jsonl` gets one
line for the resource and one for each lifecycle span as it starts; the process holds a lock on it while it lives.
`<role>-<pid>.open` is the OpenTable. Readers take a span from wherever it is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.tracing import encode
from minivllm.tracing.open_table import OpenTable
from minivllm.tracing.process import clock, identity
from minivllm.tracing.spool import Spool

if TYPE_CHECKING:
    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
# A longer run leaves the rest in the spool rather than keep whoever waits for its end; readers know both.
CLOSE_LIMIT_S = 1.0
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def _lock(fd: int) -> None:
    """Lock, waiting a little for a reader that is just testing; a trace without the lock is still a trace."""
    for _ in range(20):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            time.sleep(0.002)


class TraceFiles:
    """Writes what it is given at once; a full disk or a removed directory costs the trace, never the run."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.owner = (identity.role, identity.pid)
        stem = f"{identity.role}-{identity.pid}"
        self._spans_fd = os.open(self.directory / f"{stem}.jsonl", _APPEND, 0o644)
        self._journal_fd = os.open(self.directory / f"{stem}.journal.jsonl", _APPEND, 0o644)
        # Held until the process is gone: the reader tells a span still open from one that will never end by it.
        _lock(self._journal_fd)
        self._table_path = self.directory / f"{stem}.open"
        try:
            self.table = OpenTable(self._table_path, identity.pid, clock.offset_ns)
            self.spool = Spool(self.directory / f"{stem}.spool")
        except OSError:
            self.remove_table()
            os.close(self._spans_fd)
            os.close(self._journal_fd)
            raise
        self._failed = False
        self._resource = ""
        self.write_resource()

    def belongs_to(self, directory: str | None) -> bool:
        """Whether a process of this role would write to these files, too."""
        if directory is None:
            return False
        return self.directory == Path(directory).absolute() and self.owner == (identity.role, identity.pid)

    def write_resource(self) -> None:
        """Say who this process is, again whenever its label or name has changed."""
        self._resource = encode.resource(identity.resource())
        self._write(
            self._journal_fd,
            f'{{"resource":{self._resource},"clockOffsetNano":"{clock.offset_ns}"}}\n'.encode(),
        )
        self.spool.resource(self._resource, clock.offset_ns)

    def journal(self, span: Span) -> None:
        """Note the start of a span with what is known about it; one write, so that lines never mix."""
        self._write(self._journal_fd, f'{{"span":{encode.span(span)}}}\n'.encode())

    def write(self, limit_s: float | None = None) -> bool:
        """Write OTLP/JSON of what is new in the spool; returns whether that was all. limit_s: None takes its time."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for line in self.spool.new_lines():
            self._write(self._spans_fd, line)
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True

    def forget(self, span: Span) -> None:
        """Free the span's slot in the table: it will be in another file."""
        if span.slot:
            self.table.release(span.slot)
            span.slot = 0

    def _write(self, fd: int, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("trace of %s is incomplete: %s: %s", identity.role, self.directory, error)

    def remove_table(self) -> None:
        """At a clean end: everything is in the other files."""
        self._table_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Make OTLP/JSON of everything and close all files; the lock goes with them."""
        complete = self.write(CLOSE_LIMIT_S) and not self._failed
        if complete and self.spool.ours:
            self.spool.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close all files as they are."""
        self.spool.close()
        os.close(self._spans_fd)
        os.close(self._journal_fd)
