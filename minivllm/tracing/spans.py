"""The span itself and the hot path around it.

vLLM 0.25.1: vllm/tracing/__init__.py (instrument), vllm/tracing/otel.py (instrument_otel)
Articles: part 2 §2.4.8

Deviation from vLLM: a span is two numbers in mapped memory and what it has to say, written outside the hot path, at less
than a tenth of the cost of an SDK span, so that RPCs and queue messages can be traced without changing what is measured.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

import msgspec

from minivllm.tracing import context, failpoints, span_log
from minivllm.tracing import ended as _ended
from minivllm.tracing.board import MAX_DEPTH
from minivllm.tracing.catalogue import BY_INDEX, SPANS, spec
from minivllm.tracing.ended import ended, write_ended
from minivllm.tracing.gate import STEPS, Gate
from minivllm.tracing.open_table import OPEN_SLOT, SLOT_SHIFT, OpenTable
from minivllm.tracing.parents import parents
from minivllm.tracing.place import NOWHERE, Site, ThreadState, find_site, local, make_site, threads
from minivllm.tracing.recorder import recorder
from minivllm.tracing.span_log import turn_page
from minivllm.tracing.spec import LIFECYCLE, OFF, RPC, SpanSpec
from minivllm.tracing.spool import Spool

F = TypeVar("F", bound=Callable[..., Any])
STATUS_UNSET, STATUS_OK, STATUS_ERROR = 0, 1, 2


_level = OFF
_enabled: dict[str, SpanSpec] = {}
_failpoints: dict[str, list[failpoints.Failpoint]] = {}
_gate: Gate | None = None
_halts: frozenset[str] = frozenset()  # names at whose begin a failpoint or the gate wants to be asked
_sites: list[Site | None] = [None] * (len(BY_INDEX) + 1)
_placed: set[int] = set()  # rows of the catalogue whose place the spool knows
_open = recorder.open
_spool: Spool | None = None

_table: OpenTable | None = None
_homeless = memoryview(bytearray(32)).cast("Q")  # where spans end whose log is closed
_next_id = context.new_span_ids().__next__

# What a span of the hot path needs, together: they share lines of the cache, in which they rarely are.
# Those recorded, above lifecycle, and seen before, with their index in the catalogue; negative: not shown on the board.
_hot: dict[str, int] = {}
_local = local
_pack, _unpack = context.PACKED.pack, context.PACKED.unpack
_now = monotonic_ns
_keep = ended.append


class Span(msgspec.Struct, gc=False, eq=False):
    """One step that is running or has run. Made by span(), hot_span() and start_span() only.

    A hot path may set `attributes` itself, which saves it the call of set().

    Times are nanoseconds of the monotonic clock. gc=False: a span refers to the spans around it, never in a cycle.
    """

    index: int  # in the catalogue
    attributes: dict[str, Any] | None
    thread: ThreadState
    outer: Span | None
    trace_id: bytes
    span_id: int
    parent_id: int
    start_ns: int
    words: memoryview  # the unit of the span log where its entry is
    word: int  # where the entry begins; of a span that is not in the log: 0
    depth: int = -1
    ended_ns: int = 0  # see end_ns
    more: bool = False  # whether there is more to say than attributes
    links: tuple[bytes, ...] = ()
    slot: int = 0  # in the open table, of a span that is not in the log
    own_kind: str = ""  # where it is another one than the catalogue's
    site: Site | None = None
    status: int = STATUS_UNSET
    status_message: str = ""
    events: list[tuple[int, str, dict[str, Any]]] | None = None

    @property
    def spec(self) -> SpanSpec:
        return BY_INDEX[self.index - 1]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> str:
        return self.own_kind or self.spec.kind

    @property
    def place(self) -> Site:
        """Where in the source the span was emitted; for hot spans, where the first of its name was."""
        return self.site or _sites[self.spec.index] or NOWHERE

    @property
    def end_ns(self) -> int:
        """0 while the span is open. Of a span that its `with` has ended, the log alone has it."""
        return self.ended_ns or (self.words[self.word + 3] if self.word else 0)

    @property
    def recording(self) -> bool:
        """Whether this span will be written; use it to skip the computing of costly attributes."""
        return self.start_ns != 0 and not self.end_ns

    @property
    def context(self) -> bytes:
        """25 bytes that make a span elsewhere a child of this one; b"" when tracing is off."""
        return _pack(self.trace_id, self.span_id, 1) if self.span_id else b""

    def set(self, attrs: dict[str, Any] | None = None, **attributes: Any) -> None:
        """Add attributes: `foo=` becomes `minivllm.foo`, names with dots go through `attrs` unchanged."""
        if self.attributes:
            self.attributes.update(attributes)
        else:
            self.attributes = attributes
        if attrs:
            self.attributes.update(attrs)

    def event(self, name: str, attrs: dict[str, Any] | None = None, **attributes: Any) -> None:
        """Note that something happened now, at one moment within the step."""
        if attrs:
            attributes.update(attrs)
        if self.events is None:
            self.events = []
            self.more = True
        self.events.append((_now(), name, attributes))

    def link(self, packed: bytes) -> None:
        """Refer to a span elsewhere that is not the parent, such as the enqueue of the message just dequeued."""
        if packed:
            self.links = (*self.links, packed)
            self.more = True

    def error(self, message: str) -> None:
        """Mark the step as failed without an exception."""
        self.status = STATUS_ERROR
        self.status_message = message
        self.more = True

    def record_exception(self, exc: BaseException) -> None:
        """Mark the step as failed and keep type, message and traceback.

        SystemExit, KeyboardInterrupt and GeneratorExit are ways to end, not errors: only their name is kept.
        """
        name = type(exc).__qualname__
        if type(exc).__module__ not in ("builtins", "__main__"):
            name = f"{type(exc).__module__}.{name}"
        if not isinstance(exc, Exception):
            self.set(ended_by=name)
            return
        self.error(f"{name}: {exc}")
        self.set({"error.type": name})
        stack = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        self.event(
            "exception",
            {"exception.type": name, "exception.message": str(exc), "exception.stacktrace": stack},
        )

    def end(self) -> None:
        """End the span, in any thread. Ending it again, or after shutdown(), does nothing."""
        if not self.end_ns:
            end_ns = self.ended_ns = _now()
            self._keep_details()
            self.words[self.word + 3] = end_ns

    def _keep_details(self) -> None:
        """What there is to say, before the end is in the log: who sees that has all the rest."""
        if self.words is _homeless:
            if _spool is not None:
                _spool.keep_as_text(self)
        elif self.own_kind or self.status or self.events:
            _keep(
                (
                    self.span_id,
                    self.attributes or {},
                    self.links,
                    self.own_kind,
                    self.status,
                    self.status_message,
                    self.events,
                )
            )
        elif self.links:
            _keep((self.span_id, self.attributes or {}, self.links))
        elif self.attributes:
            _keep((self.span_id, self.attributes))

    def __enter__(self) -> Span:
        return self  # span() has entered it: a call that looks at all this again costs too much

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        thread = self.thread
        depth = self.depth
        if depth >= 0 and (board := thread.board) is not None:
            if board.open == depth + 1 < MAX_DEPTH:
                board.open = depth
                board.steps[depth] = 0
            else:
                board.restore(depth)
        if exc is not None:
            if thread.current is not self:
                _end_inner(thread, self, exc)
            self.record_exception(exc)
            self.end()
            write_ended()
        elif not self.ended_ns:
            # The body of end(), once more: a call less. Only the log knows the time: to set a field takes as long as all of this.
            end_ns = _now()
            if self.more:
                self.ended_ns = end_ns
                self._keep_details()
            elif self.attributes:
                _keep((self.span_id, self.attributes))
            self.words[self.word + 3] = end_ns
        # Last, and no call between the end and this: where a signal handler raises in here, the step around finds us.
        thread.current = self.outer

    def _leave(self, exc: BaseException) -> None:
        """End a step whose `with` could not, or not wholly; for the step around it."""
        if not (self.words[self.word + 3] if self.word else self.ended_ns):
            self.ended_ns = 0
            self.record_exception(exc)
            self.end()


class _Unhurried(Span, gc=False, eq=False):
    """What leaves its block the readable way."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        thread = self.thread
        if self.depth >= 0 and thread.board is not None:
            thread.board.restore(self.depth)
        if exc is not None:
            if thread.current is not self:
                _end_inner(thread, self, exc)
            self.record_exception(exc)
        self.end()
        thread.current = self.outer  # last, as above


class _Live(_Unhurried, gc=False, eq=False):
    """A span of the hot path that a live export gets as well."""

    @property
    def end_ns(self) -> int:
        return self.ended_ns  # its words may be nobody's

    def end(self) -> None:
        if not self.end_ns:
            super().end()
            recorder.give_on(self)

    def _leave(self, exc: BaseException) -> None:
        # It may have ended and not been given on: rather twice than not at all.
        self.ended_ns = 0
        self.record_exception(exc)
        self.end()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, tb)
        self.outer = None  # else a chain of spans that have ended
        write_ended()


class _Cold(_Unhurried, gc=False, eq=False):
    """A step of the lifecycle, one that start_span() began, or one where something may happen: few, and written at once."""

    def end(self) -> None:
        # Whoever takes it out of what is open has ended it.
        if _open.pop(self.span_id, None) is not None:
            end_ns = self.ended_ns = _now()
            if self.slot and _table is not None:
                _table.ends[self.slot] = end_ns
            write_ended(self)
            recorder.give_on(self)

    def _leave(self, exc: BaseException) -> None:
        if self.ended_ns:
            # Perhaps for the second time: rather twice than not at all, and in the files it counts once.
            write_ended(self)
            recorder.give_on(self)
        else:
            _open[self.span_id] = self  # end() may have got as far as taking it out
            self.record_exception(exc)
            self.end()

    def __enter__(self) -> Span:
        thread = self.thread
        thread.current = self
        if thread.board is not None and self.spec.level <= RPC:
            self.depth = thread.board.push(self.spec.index)
        if self.spec.name in _halts:
            try:
                _halt(self)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self


class _Root(_Cold, gc=False, eq=False):
    """A span that is the parent of what threads without an open span record."""

    def end(self) -> None:
        if self in parents.roots:
            parents.roots.remove(self)
        super().end()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self in parents.roots:
            parents.roots.remove(self)
        super().__exit__(exc_type, exc, tb)


class _Step(_Cold, gc=False, eq=False):
    """A step that is not recorded but shows on the board and has failpoints; it has the ids of the span around it."""

    def event(self, name: str, attrs: dict[str, Any] | None = None, **attributes: Any) -> None: ...
    def record_exception(self, exc: BaseException) -> None: ...
    def end(self) -> None: ...
    def _leave(self, exc: BaseException) -> None: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        thread = self.thread
        if self.depth >= 0 and thread.board is not None:
            thread.board.restore(self.depth)
        if exc is not None and thread.current is not self:
            _end_inner(thread, self, exc)
        thread.current = self.outer


class _NullSpan(Span, gc=False, eq=False):
    """What span() returns for a step that nobody looks at: everything is accepted and nothing kept."""

    def set(self, attrs: dict[str, Any] | None = None, **attributes: Any) -> None: ...
    def event(self, name: str, attrs: dict[str, Any] | None = None, **attributes: Any) -> None: ...
    def link(self, packed: bytes) -> None: ...
    def error(self, message: str) -> None: ...
    def record_exception(self, exc: BaseException) -> None: ...
    def end(self) -> None: ...
    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def _end_inner(thread: ThreadState, around: Span, exc: BaseException) -> None:
    """End the steps within `around` that are open although an exception leaves it.

    A signal handler's exception may come in the middle of their __exit__, or between span() and the `with`. What they have
    sent away names them as parent: they must not be missing.
    """
    inner = []
    item = thread.current
    while item is not None and item is not around:
        inner.append(item)
        item = item.outer
    if item is around:
        for item in inner:
            item._leave(exc)


NULL: Span = _NullSpan(BY_INDEX[0].index, {}, _local.thread, None, b"", 0, 0, 0, _homeless, 0)
_make: type[Span] = Span  # of the hot path: Span or _Live


def span(
    name: str,
    *,
    parent: bytes | None = None,
    links: tuple[bytes, ...] = (),
    kind: str = "",
    attrs: dict[str, Any] | None = None,
    **attributes: Any,
) -> Span:
    """Start one step of the catalogue and return its span, to be used at once in a `with`.

    Args:
        name: name in the catalogue, which also gives level and kind.
        parent: packed context of the parent; None or b"" takes the thread's innermost open span.
        links: packed contexts of spans that this one refers to.
        kind: "internal", "client", "server", "producer" or "consumer"; the catalogue's when empty.
        attrs: attributes whose names have dots (the conventions' names). Given alone, the span keeps this very object,
            which is what costs a hot path least.
        attributes: our own attributes; `foo` is written as `minivllm.foo`.

    Raises:
        KeyError: the name is not in the catalogue (checked only while tracing is active).
    """
    if attrs is not None:
        if attributes:
            attributes.update(attrs)
        else:
            attributes = attrs
    if name not in _hot:
        if name not in _enabled:
            if _level or _failpoints:
                spec(name)
            return NULL
        return _cold_span(SPANS[name], sys._getframe(1), parent, links, kind, attributes)
    item = hot_span(name, attributes, parent)
    if links:
        item.links = links
        item.more = True
    if kind and kind != item.spec.kind:
        item.own_kind = kind
        item.more = True
    return item


def hot_span(name: str, attributes: dict[str, Any] | None = None, parent: bytes | None = None) -> Span:
    """span() for the steps of each call and message: without keywords, which Python takes slowly, so a sixth quicker.

    Args:
        name: likewise.
        attributes: as they are written: our own without a dot, the conventions' names with theirs. The span keeps this very
            object. A span that began without any has None, so set() them, or assign the whole.
        parent: likewise.
    """
    index = _hot.get(name)
    if index is None:
        if name not in _enabled:
            if _level or _failpoints:
                spec(name)
            return NULL
        if attributes is None:
            attributes = {}
        return _cold_span(SPANS[name], sys._getframe(1), parent, (), "", attributes)
    thread = _local.thread
    outer = thread.current
    if parent:
        trace_id, parent_id, _ = _unpack(parent)
    elif outer is not None and outer.span_id:
        trace_id = outer.trace_id
        parent_id = outer.span_id
    else:
        trace_id, parent_id = parents.find(None, name)
    # No call between these lines, but the one of turn_page(): a signal handler may record spans, too.
    word = thread.word
    if trace_id != thread.trace_id:
        word = turn_page(thread, trace_id)
    else:
        thread.word = word + 4
        if word >= thread.end:
            word = turn_page(thread, trace_id)
    words = thread.words
    span_id = thread.first_id + word
    depth = -1
    if index < 0:
        index = -index
    elif (board := thread.board) is not None:
        # The body of Board.push(), once more: a call less.
        depth = board.open
        if depth < MAX_DEPTH:
            board.steps[depth] = index
        board.open = depth + 1
    words[word + 1] = parent_id
    words[word + 2] = index
    start_ns = words[word] = _now()
    item = thread.current = _make(
        index, attributes, thread, outer, trace_id, span_id, parent_id, start_ns, words, word, depth
    )
    return item


def _cold_span(
    entry: SpanSpec,
    frame: FrameType,
    parent: bytes | None,
    links: tuple[bytes, ...],
    kind: str,
    attributes: dict[str, Any],
) -> Span:
    """The rare cases of span(): a step of the lifecycle, one that is not recorded, or the first of its name."""
    thread = _local.thread
    if entry.level > _level:
        return _step(entry, thread, attributes, kind)
    site = find_site(frame)
    if entry.level > LIFECYCLE:
        # Spans of the hot path keep the place of their first emission: looking it up each time costs too much.
        _make_hot(entry, site)
        return _start(entry, attributes, kind, links, None, thread, parent, _now())
    return _start(entry, attributes, kind, links, site, thread, parent, _now())


def _make_hot(entry: SpanSpec, site: Site) -> None:
    if entry.index not in _placed:
        _placed.add(entry.index)
        _sites[entry.index] = site
        if _spool is not None:
            _spool.place(entry.index, site)
    if entry.name not in _halts:
        _hot[entry.name] = entry.index if entry.level <= RPC else -entry.index


def _step(entry: SpanSpec, thread: ThreadState, attributes: dict[str, Any], kind: str) -> Span:
    outer = thread.current
    ids = (outer.trace_id, outer.span_id) if outer is not None else (b"", 0)
    return _Step(entry.index, attributes, thread, outer, *ids, 0, 0, _homeless, 0, own_kind=kind)


def start_span(
    name: str,
    *,
    parent: bytes | None = None,
    links: tuple[bytes, ...] = (),
    kind: str = "",
    attrs: dict[str, Any] | None = None,
    **attributes: Any,
) -> Span:
    """Start a span that is not tied to a block: end() it yourself, in any thread. Arguments as for span().

    It does not become the thread's current span; give `parent=that.context` to its children. The span `run`
    adopts spans of threads that have no other parent while it is open.
    """
    entry = _enabled.get(name)
    if entry is None:
        if _level or _failpoints:
            spec(name)
        return NULL
    if attrs is not None:
        attributes.update(attrs)
    return start_at(entry, find_site(sys._getframe(1)), _now(), parent, links, kind, attributes)


def start_at(
    entry: SpanSpec,
    site: Site,
    start_ns: int,
    parent: bytes | None,
    links: tuple[bytes, ...],
    kind: str,
    attributes: dict[str, Any],
) -> Span:
    """Start a span outside the thread's stack at a given moment; failpoints and live stepping halt here."""
    thread = _local.thread
    item = NULL
    if entry.level <= _level:
        item = _start(entry, attributes, kind, links, site, thread, parent, start_ns, entry.name == "run")
    if entry.name in _halts:
        try:
            _halt(item, entry)
        except BaseException as error:
            item.record_exception(error)
            item.end()
            raise
    return item


def _start(
    entry: SpanSpec,
    attributes: dict[str, Any],
    kind: str,
    links: tuple[bytes, ...],
    site: Site | None,
    thread: ThreadState,
    parent: bytes | None,
    start_ns: int,
    root: bool | None = None,
) -> Span:
    """Make and note a recorded span. root: adopts spans of other threads; None: if its thread is the main one."""
    outer = thread.current
    if parent or outer is None or not outer.span_id:
        trace_id, parent_id = parents.find(parent, entry.name)
    else:
        trace_id, parent_id = outer.trace_id, outer.span_id
    span_id = _next_id()
    slot = _table.take() if _table is not None else 0
    if slot and _table is not None:
        at = slot << SLOT_SHIFT
        OPEN_SLOT.pack_into(
            _table.memory, at, entry.index, thread.native_id, span_id, parent_id, start_ns, trace_id
        )
    if root is None:
        root = entry.level == LIFECYCLE and outer is None and thread.main
    item = (_Root if root else _Cold)(
        entry.index,
        attributes,
        thread,
        outer,
        trace_id,
        span_id,
        parent_id,
        start_ns,
        _homeless,
        0,
    )
    item.links = links
    item.slot = slot
    item.site = site
    if kind != entry.kind:
        item.own_kind = kind
    _open[span_id] = item
    if root:
        parents.roots.append(item)
    if (entry.level == LIFECYCLE or not slot) and recorder.files is not None:
        with recorder.lock:
            if recorder.files is not None:
                recorder.files.journal(item)
    return item


def instrument(name: str, **attributes: Any) -> Callable[[F], F]:
    """Decorate a function so that each call is a span; the site is the function itself.

    Raises:
        KeyError: the name is not in the catalogue.
    """
    entry = spec(name)

    def decorate(function: F) -> F:
        code = inspect.unwrap(function).__code__
        site = make_site(code, code.co_firstlineno, function.__module__, function.__qualname__)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if name in _hot:
                with hot_span(name, attributes.copy() if attributes else None):
                    return function(*args, **kwargs)
            if name not in _enabled:
                return function(*args, **kwargs)
            thread = _local.thread
            if entry.level > _level:
                item = _step(entry, thread, attributes, "")
            else:
                place: Site | None = site
                if entry.level > LIFECYCLE:
                    place = None
                    _make_hot(entry, site)
                item = _start(entry, attributes.copy(), "", (), place, thread, None, _now())
            with item:
                return function(*args, **kwargs)

        return cast(F, wrapper)

    return decorate


def current_span() -> Span:
    """The innermost open recorded span of this thread; a null span when there is none."""
    item = _local.thread.current
    while item is not None and not item.start_ns:
        item = item.outer
    return item or NULL


def pack_context() -> bytes:
    """25 bytes of the span that a message sent now belongs to; b"" when tracing is off."""
    if not _level:
        return b""
    item = _local.thread.current
    if item is not None and item.span_id:
        return context.pack(item.trace_id, item.span_id)
    parent = parents.default()
    return context.pack(*parent) if parent is not None else b""


def _halt(item: Span, entry: SpanSpec | None = None) -> None:
    entry = entry or item.spec
    if _gate is not None and entry.name in STEPS:
        _gate.stop(entry, item)
    for failpoint in _failpoints.get(entry.name, ()):
        if failpoint.due(entry):
            item.event("failpoint", action=failpoint.text)
            failpoints.act(failpoint, save_before_death)


def open_spans() -> list[Span]:
    """Recorded spans of all threads that have not ended, of all levels."""
    found = dict(_open)
    for thread in list(threads.values()):
        item = thread.current
        while item is not None:
            if item.recording:
                found[item.span_id] = item
            item = item.outer
    return list(found.values())


def save_before_death() -> None:
    """Hand on finished spans and journal the open ones of all levels, as far as this can still be done."""
    write_ended()
    recorder.hand_on()
    with recorder.lock:
        if recorder.files is not None:
            for item in open_spans():
                recorder.files.journal(item)


def enabled(name: str) -> SpanSpec | None:
    """The entry of a step that is recorded, shown on a board or has failpoints."""
    return _enabled.get(spec(name).name)


def apply(
    level: int, active_failpoints: dict[str, list[failpoints.Failpoint]], gate: Gate | None = None
) -> None:
    """Set what the hot path looks at."""
    global _level, _failpoints, _gate, _halts, _enabled, _hot, _table, _spool, _make
    _level, _failpoints, _gate = level, active_failpoints, gate
    _halts = frozenset(active_failpoints) | (STEPS if gate is not None else frozenset())
    # Lifecycle spans are always real, since the step board must be right with tracing off, too.
    visible = max(level, RPC if active_failpoints else LIFECYCLE)
    _enabled = {
        name: entry for name, entry in SPANS.items() if entry.level <= visible or name in active_failpoints
    }
    _hot = {}
    _placed.clear()
    files = recorder.files if level else None
    _table, _spool, log = (None, None, None) if files is None else (files.table, files.spool, files.log)
    _ended.use(_table, _spool)
    span_log.use(log)
    _make = _Live if recorder.sinks else Span


def move_open_spans() -> None:
    """What is open will be in other files than those of now."""
    for item in open_spans():
        if item.slot and _table is not None:
            _table.release(item.slot)
            item.slot = 0
        elif item.word:
            item.more = True  # the way through _keep_details(), which finds it homeless
            item.words, item.word = _homeless, 0


def forget() -> None:
    """In a forked child: new ids, nothing open, no board; the parent's context becomes that of the environment."""
    global _next_id
    _next_id = context.new_span_ids().__next__
    packed = pack_context()
    parents.forget(context.unpack(packed) if packed else None)
    for item in open_spans():
        item.slot = 0
        item.ended_ns = item.start_ns  # the parent's to end
    threads.clear()
    _local.renew()  # without the board: that line is the parent's
    _ended.forget()
    span_log.forget()
    recorder.forget()
