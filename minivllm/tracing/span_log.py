"""The span log: begin and end of each span of the hot path, as numbers in a mapped file, at the moment they happen.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: part 2 §2.6

Between two spans the model has used the caches for itself, so that a span costs as much as the memory that it touches.
An object per span that waits to be written is a dozen cache lines when it is made and again when it is written: it took
more than all the rest. So of a span that has ended nothing stays in memory but its attributes, if it has any.

The file consists of pages of 4096 bytes, each used by one thread for spans of one trace. A page begins with a header
(PAGE below; the magic number comes last, so that a header that a kill has cut short is none). After it come entries of four
u64, in native byte order:

    start (monotonic ns; 0: it has not begun), id of the parent, index in the catalogue, end (0: it has not ended)

The start is stored last when a span begins. The id of a span follows from its place: that of the page and the number of
its first word there. Attributes, links and the rest come into the spool, by this id.
"""

from __future__ import annotations

import itertools
import secrets
import struct
from collections.abc import Iterator
from itertools import repeat
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from minivllm.tracing import encode
from minivllm.tracing.ended import write_ended
from minivllm.tracing.mapped import MappedFile
from minivllm.tracing.place import threads

if TYPE_CHECKING:
    from minivllm.tracing.place import ThreadState

PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 8
# Number of the resource, first id, thread id, trace id, thread name, magic.
PAGE = struct.Struct("=QQQ16s80s8s")
MAGIC = b"MVSPANS1"
FIRST_WORD = PAGE.size // 8
ENTRY = struct.Struct("=QQQQ")
ENTRY_WORDS = ENTRY.size // 8
ENTRIES = (PAGE_BYTES - PAGE.size) // ENTRY.size
_KEPT_PAGES = 8  # of other traces, per thread


class Page(NamedTuple):
    """A page that a thread writes to, and how far it has come. Words are counted within `words`.

    Attributes:
        stamp: number of the resource that the page belongs to; 0: it leads nowhere.
    """

    stamp: int
    words: memoryview
    word: int
    end: int
    first_id: int


class SpanLog(MappedFile):
    """The writer's side: gives out pages.

    Attributes:
        resource: number of the resource record in the spool that says whose spans the following pages hold.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file cannot be made, or the disk is full."""
        super().__init__(path)
        self.resource = 0
        try:
            self._free = _pages_of(self.next_unit())
        except OSError:
            self.close()
            raise

    def page(self, thread: ThreadState, trace_id: bytes) -> Page:
        """A new page for a thread. On a full disk one that leads nowhere."""
        with self.lock:
            free = next(self._free, None)
            if free is None and not self.failed:
                try:
                    self._free = pages = _pages_of(self.next_unit())
                    free = next(pages, None)
                except (OSError, ValueError) as error:
                    self.give_up(error)
        if free is None:
            return nowhere()
        unit, words, at = free
        first_id = _next_ids()
        name = thread.name.encode(errors="replace")[:80]
        PAGE.pack_into(unit, at, self.resource, first_id, thread.native_id, trace_id, name, MAGIC)
        word = at // 8
        return Page(self.resource, words, word + FIRST_WORD, word + PAGE_WORDS, first_id - word)


def _pages_of(unit: mmap) -> Iterator[tuple[mmap, memoryview, int]]:
    """One object, since a signal handler may take pages while another unit takes the place of this one."""
    return zip(
        repeat(unit), repeat(memoryview(unit).cast("Q")), range(0, len(unit), PAGE_BYTES), strict=False
    )


_log: SpanLog | None = None
_next_ids = itertools.count(secrets.randbits(62) | 1 << 61, PAGE_WORDS).__next__
_scratch = memoryview(bytearray(PAGE_BYTES)).cast("Q")


def use(log: SpanLog | None) -> None:
    """Where threads find their next page from now on; None: nowhere, for spans that only a live export sees."""
    global _log
    _log = log
    turn_all_pages()


def turn_all_pages() -> None:
    """Have all threads take new pages."""
    for thread in list(threads.values()):
        thread.end = 0


def nowhere() -> Page:
    """What is stored here nobody reads."""
    return Page(0, _scratch, 0, PAGE_WORDS, _next_ids())


def turn_page(thread: ThreadState, trace_id: bytes) -> int:
    """Have the thread write spans of this trace from now on; returns the first word of the next span's entry.

    Threads that work for two runs in turn keep a page of each.
    """
    write_ended()  # so that no more than a page of it waits
    log = _log
    # Given up before anything is called: what a signal handler records in between goes to another page.
    last, last_trace_id = (
        (thread.stamp, thread.words, thread.word, thread.end, thread.first_id),
        thread.trace_id,
    )
    thread.end = 0
    if len(thread.pages) >= _KEPT_PAGES:
        thread.pages.clear()
    thread.pages[last_trace_id] = Page(*last)
    page = thread.pages.pop(trace_id, None)
    if page is None or page.stamp != (log.resource if log is not None else 0) or page.word >= page.end:
        page = log.page(thread, trace_id) if log is not None else nowhere()
    # No call between these lines: a signal handler may record spans, too.
    thread.stamp, thread.words, word, thread.end, thread.first_id = page
    thread.trace_id = trace_id
    thread.word = word + ENTRY_WORDS
    return word


def forget() -> None:
    """In a forked child: other ids than the parent's, and no file yet."""
    global _next_ids
    _next_ids = itertools.count(secrets.randbits(62) | 1 << 61, PAGE_WORDS).__next__
    use(None)


class LoggedSpan(msgspec.Struct, gc=False, frozen=True):
    """An entry as a reader finds it. Times of the monotonic clock; end_ns is 0 while the span is open.

    gc=False: there are many of them, and none refers to another.
    """

    page: LoggedPage
    span_id: int
    parent_id: int
    row: int  # of the catalogue, from 1
    start_ns: int
    end_ns: int


class LoggedPage(NamedTuple):
    """The header of a page.

    Attributes:
        thread: its attributes as OTLP/JSON, and a comma.
    """

    resource: int
    first_id: int
    trace_id: bytes
    thread: str


class LogReader:
    """Reads a log, whole or as it grows."""

    def __init__(self, position: int = 0) -> None:
        self._end = position
        self._pages: list[int] = []  # offsets of pages that may still have something to say
        self._forgotten: dict[int, set[int]] = {}  # spans of each page, by its first id

    def spans(self, data: bytes | mmap) -> list[LoggedSpan]:
        """All spans but for those forgotten; data: the whole file."""
        end = len(data) // PAGE_BYTES * PAGE_BYTES
        pages, end = [*self._pages, *range(self._end, end, PAGE_BYTES)], max(self._end, end)
        # No call between these two: a signal handler that raises must not come in between.
        self._pages = pages
        self._end = end
        return list(self._spans(data))

    def forget(self, spans: list[LoggedSpan]) -> None:
        """Do not find these again."""
        for span in spans:
            self._forgotten.setdefault(span.page.first_id, set()).add(span.span_id)

    def _spans(self, data: bytes | mmap) -> Iterator[LoggedSpan]:
        done = []
        for at in self._pages:
            if data[at + PAGE.size - len(MAGIC) : at + PAGE.size] != MAGIC:
                continue
            resource, first_id, thread_id, trace_id, name, _ = PAGE.unpack_from(data, at)
            forgotten = self._forgotten.get(first_id, ())
            if len(forgotten) == ENTRIES:
                done.append((at, first_id))
                continue
            thread = encode.thread(thread_id, name.rstrip(b"\0").decode(errors="replace"))
            page = LoggedPage(resource, first_id, trace_id, thread)
            # Not only up to the first that is empty: a signal handler takes the next one while this is being filled.
            entries = ENTRY.iter_unpack(data[at + PAGE.size : at + PAGE_BYTES])
            ids = itertools.count(first_id + FIRST_WORD, ENTRY_WORDS)
            for span_id, (start_ns, parent_id, row, end_ns) in zip(ids, entries, strict=False):
                if start_ns and span_id not in forgotten:
                    yield LoggedSpan(page, span_id, parent_id, row, start_ns, end_ns)
        for at, first_id in done:
            self._pages.remove(at)
            del self._forgotten[first_id]
