"""Where a span was emitted: its place in the source and its thread, each described once and not per span.

vLLM 0.25.1: vllm/tracing/otel.py (instrument_otel)
Articles: none
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import msgspec

import minivllm
from minivllm.tracing import encode
from minivllm.tracing.encode import quote

if TYPE_CHECKING:
    from minivllm.tracing.board import Board
    from minivllm.tracing.span_log import Page
    from minivllm.tracing.spans import Span

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(minivllm.__file__))) + os.sep
_sites: dict[tuple[CodeType, int], Site] = {}

threads: dict[int, ThreadState] = {}
"""Those that live, by the id of the object."""

at_thread_end: list[Callable[[], None]] = []
"""What a thread that has recorded something does last; from ended.py."""


class Site(msgspec.Struct, frozen=True, eq=False):
    """A place in the source that emits spans; `json` holds its attributes ready for the file."""

    function: str
    path: str
    line: int
    json: str


NOWHERE = Site("?", "?", 0, '{"key":"code.function.name","value":{"stringValue":"?"}}')


class ThreadState:
    """What the hot path needs to know about its thread.

    Attributes:
        current: the innermost open span of a `with`.
        board: the step board that this thread keeps, if any.
        word: the next free entry of its page of the span log, in words from the start of `words`; there is none from `end` on.
        words: the unit of the log that the page is in, as words.
        stamp: of the page, see Page.
        first_id: the id of a span minus the word where its entry begins.
        trace_id: of the spans in the page.
        pages: pages for spans of other traces.
    """

    __slots__ = (
        "board",
        "current",
        "end",
        "first_id",
        "json",
        "main",
        "name",
        "native_id",
        "pages",
        "stamp",
        "trace_id",
        "word",
        "words",
    )

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.current: Span | None = None
        self.board: Board | None = None
        self.name = thread.name
        self.native_id = threading.get_native_id()
        self.main = thread is threading.main_thread()
        self.json = encode.thread(self.native_id, self.name)
        self.word = self.end = self.first_id = self.stamp = 0  # the first span turns the page
        self.words = memoryview(b"").cast("Q")
        self.trace_id = b""
        self.pages: dict[bytes, Page] = {}


class _Farewell:
    """Goes with its thread."""

    __slots__ = ("_at_end", "_thread", "_threads")

    def __init__(self, thread: ThreadState) -> None:
        self._thread = id(thread)
        # Not by their names: those are gone when the interpreter ends before its main thread does.
        self._threads, self._at_end = threads, at_thread_end

    def __del__(self) -> None:
        self._threads.pop(self._thread, None)
        for farewell in self._at_end:
            farewell()


class ThreadLocal(threading.local):
    """Holds the ThreadState of the calling thread."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew, with no span open."""
        thread = self.thread = ThreadState()
        threads[id(thread)] = thread
        self._farewell = _Farewell(thread)


local = ThreadLocal()


def make_site(code: CodeType, line: int, module: str, qualname: str) -> Site:
    """Describe a place. Files outside the package are named without their directory, which is this machine's."""
    path = code.co_filename
    path = path[len(_ROOT) :].replace(os.sep, "/") if path.startswith(_ROOT) else os.path.basename(path)
    function = f"{module}.{qualname}"
    return Site(
        function,
        path,
        line,
        f'{{"key":"code.function.name","value":{{"stringValue":{quote(function)}}}}},'
        f'{{"key":"code.file.path","value":{{"stringValue":{quote(path)}}}}},'
        f'{{"key":"code.line.number","value":{{"intValue":"{line}"}}}}',
    )


def find_site(frame: FrameType) -> Site:
    """The place in the source at which this frame is."""
    code, line = frame.f_code, frame.f_lineno
    site = _sites.get((code, line))
    if site is None:
        qualname = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no co_qualname
        site = make_site(code, line, frame.f_globals.get("__name__", "?"), qualname)
        _sites[code, line] = site
    return site
