"""Spans that have ended and are not in the spool yet: they are written when the process begins to wait.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: part 2 §2.6

In the middle of a step, where the model has the caches, writing a span costs several times what it costs in a lot of
ten. Until then its name, ids and times are in the open table, so a kill costs at most its attributes.

Written it is: when a thread begins to wait for a message, when the free slots of the open table are used up, when a step of
the lifecycle, a failed one or a thread ends, and before everything that ends a process or asks for its spans.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from minivllm.tracing import place
from minivllm.tracing.process import identity
from minivllm.tracing.recorder import recorder

if TYPE_CHECKING:
    from minivllm.tracing.open_table import OpenTable
    from minivllm.tracing.spans import Span
    from minivllm.tracing.spool import Spool

ended: list[Span] = []
"""Appended to by any thread, never replaced. `if ended: write_ended()` is what a wait begins with."""

_table: OpenTable | None = None
_spool: Spool | None = None
_lock = threading.RLock()


def use(table: OpenTable | None, spool: Spool | None) -> None:
    """Where spans go from now on; None: nowhere but to the sinks."""
    global _table, _spool
    with _lock:
        if table is not _table:
            for item in ended:
                item.slot = 0  # a number of the other table
        _table, _spool = table, spool


def write_ended(last: Span | None = None) -> None:
    """Put what has ended into the spool and hand it to the sinks.

    Any thread may call it, and a signal handler in the middle of it: what that has written already is written twice under
    the same ids, and counts once.

    Args:
        last: one more that has ended, and has a place of its own: a step of the lifecycle.
    """
    if not ended and last is None:
        return
    with _lock:
        if last is not None:
            if _spool is not None:
                _spool.keep_as_text(last)
            _give_on([last])
        if not ended:
            return
        lot = ended[:]
        if _spool is not None:
            _spool.keep(lot)
        # No call between these lines: a signal handler that has written the lot has also taken it away.
        if ended and ended[0] is lot[0]:
            del ended[: len(lot)]
            _give_on(lot)


def _give_on(lot: list[Span]) -> None:
    """Slots to the table, spans to the sinks."""
    if _table is not None:
        _table.free.extend([item.slot for item in lot if item.slot])
    if recorder.sinks:
        recorder.finished.extend(lot)
        if recorder.idle:
            recorder.wake()


def write_at_once(item: Span) -> None:
    """What takes the place of `ended.append` for spans that must not wait."""
    ended.append(item)
    write_ended()


def make_room() -> int:
    """A slot of the open table when none is free: those of spans that have ended, or more of them; 0: there is none."""
    write_ended()
    while (table := _table) is not None:
        try:
            return table.free.pop()
        except IndexError:
            if not table.grow():
                break
    return 0


def no_room() -> int:
    """What takes the place of `free.pop` while there is no table."""
    return 0


def forget() -> None:
    """In a forked child: what has ended in the parent is the parent's, and its lock may never be given back."""
    global _lock
    _lock = threading.RLock()
    ended.clear()
    use(None, None)


def _at_thread_end() -> None:
    # In a forked child the threads of the parent end, too, before anything of ours has been told about the fork.
    if ended and os.getpid() == identity.pid:
        write_ended()


place.at_thread_end.append(_at_thread_end)
