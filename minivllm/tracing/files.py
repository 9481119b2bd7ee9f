"""The files of one process in the trace directory: span log, spool, start journal, open table, and OTLP/JSON at the end.

vLLM 0.25.1: none
Articles: none

`<role>-<pid>.spans` is the SpanLog: when each span of the hot path began and ended. `<role>-<pid>.spool` is the Spool: what
else they have to say, and all other spans that have ended. `<role>-<pid>.jsonl` holds OTLP/JSON, one {"resourceSpans": …}
a line: at a flush and at the end it gets what the two have, and they go. `<role>-<pid>.journal.jsonl` gets one
line for the resource, one for each lifecycle span as it starts, and one for each that finds no room in the OpenTable; the
process holds a lock on it while it lives.
`<role>-<pid>.open` is the OpenTable: other spans that are open. Readers take a span from wherever it is. Where a killed
process has left files of the same names, "-2" follows the pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.tracing import encode
from minivllm.tracing.ended import write_ended
from minivllm.tracing.open_table import OpenTable
from minivllm.tracing.process import clock, identity
from minivllm.tracing.span_log import LoggedSpan, LogReader, SpanLog, turn_all_pages
from minivllm.tracing.spool import Spool
from minivllm.tracing.spool_reader import SpoolReader

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
    """Writes what it is given at once; from here on a full disk or a removed directory costs the trace, never the run."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.owner = (identity.role, identity.pid)
        stem = name = f"{identity.role}-{identity.pid}"
        for number in itertools.count(2):
            self._table_path = self.directory / f"{stem}.open"
            try:
                self.table = OpenTable(self._table_path, identity.pid, clock.offset_ns)
                break
            except FileExistsError:
                # Of a process of this name that was killed, or of one that lives in another container.
                stem = f"{name}-{number}"
        with contextlib.ExitStack() as undo:
            undo.callback(self.remove_table)
            self._spans_fd = os.open(self.directory / f"{stem}.jsonl", _APPEND, 0o644)
            undo.callback(os.close, self._spans_fd)
            self._journal_fd = os.open(self.directory / f"{stem}.journal.jsonl", _APPEND, 0o644)
            undo.callback(os.close, self._journal_fd)
            # Held until the process is gone: the reader tells a span still open from one that will never end by it.
            _lock(self._journal_fd)
            self.spool = Spool(self.directory / f"{stem}.spool")
            undo.callback(self.spool.close)
            self.log = SpanLog(self.directory / f"{stem}.spans")
            undo.pop_all()
        self._spool_reader, self._log_reader = SpoolReader(self.spool.start), LogReader(self.log.start)
        self._noted: list[LoggedSpan] = []
        self._is_writing = False
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
        self.log.resource = self.spool.resource(self._resource, clock.offset_ns)
        turn_all_pages()

    def journal(self, span: Span) -> None:
        """Note the start of a span with what is known about it; one write, so that lines never mix."""
        self._write(self._journal_fd, f'{{"span":{encode.span(span)}}}\n'.encode())

    def write(self, limit_s: float | None = None) -> bool:
        """Write OTLP/JSON of what has ended and is not written yet; returns whether that was all.

        A signal handler in the middle of it may ask for the same: it leaves the writing to whom it has interrupted, or to the
        next time. It may also raise: better twice than never.

        Args:
            limit_s: None takes its time.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        if self._is_writing:
            write_ended()
            return False
        reader = self._spool_reader
        self._is_writing = True
        try:
            with self.log.whole() as data:
                found = [span for span in self._log_reader.spans(data) if span.end_ns]
            self._noted = self._noted + found
            self._log_reader.forget(found)
            write_ended()  # now the spool has all details of those
            before = reader.position
            noted, self._noted = self._noted, []
            try:
                with self.spool.whole() as data:
                    for line in reader.lines(data, noted):
                        self._write(self._spans_fd, line)
                        if deadline is not None and time.monotonic() > deadline:
                            return False
            except BaseException:
                reader.position = before
                self._noted = noted + self._noted
                raise
            reader.forget(noted)
        finally:
            self._is_writing = False
        return True

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
        if self.write(CLOSE_LIMIT_S) and not self._failed:
            # Readers look into the log first, and do without it when there is no spool.
            self.spool.remove()
            self.log.remove()
        self.abandon()

    def abandon(self) -> None:
        """Close all files as they are."""
        self.spool.close()
        self.log.close()
        os.close(self._spans_fd)
        os.close(self._journal_fd)
