"""Details of spans that have ended and are not in the spool yet: they are written when the process begins to wait.

vLLM 0.25.1: none (the SDK's BatchSpanProcessor, whose spans are lost when a process is killed)
Articles: part 2 §2.6

In the middle of a step, where the model has the caches, writing them costs several times what it costs in a lot of
ten. The span itself, with its ids and times, is in the span log at once, so a kill costs at most attributes.

Written they are: when a thread begins to wait for a message, when its page of the span log is full, when a step of the
lifecycle, a failed one or a thread ends, and before everything that ends a process or asks for its spans.
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING

from minivllm.tracing import place
from minivllm.tracing.process import identity

if TYPE_CHECKING:
    from minivllm.tracing.open_table import OpenTable
    from minivllm.tracing.spans import Span
    from minivllm.tracing.spool import Details, Spool

ended: list[Details] = []
"""Appended to by any thread, never replaced. `if ended: write_ended()` is what a wait begins with."""

_table: OpenTable | None = None
_spool: Spool | None = None
_lock = threading.RLock()


def use(table: OpenTable | None, spool: Spool | None) -> None:
    """Where spans go from now on; None: nowhere."""
    global _table, _spool
    with _lock:
        _table, _spool = table, spool


def write_ended(last: Span | None = None) -> None:
    """Put the details of what has ended into the spool.

    Any thread may call it, and a signal handler in the middle of it: what that has written already is written twice under
    the same ids, and counts once.

    Args:
        last: a span that has ended and is not in the span log.
    """
    if not ended and last is None:
        return
    with _lock:
        if last is not None:
            if _spool is not None:
                _spool.keep_as_text(last)
            # Given back once, also when a signal handler raises in here and the span is handed in again.
            slot, last.slot = last.slot, 0
            if _table is not None and slot:
                _table.free.append(slot)
        until_ns = monotonic_ns()
        lot = ended[:]
        if not lot:
            return
        if _spool is not None:
            _spool.keep(lot, until_ns)
        # No call between these lines: a signal handler that has written the lot has also taken it away.
        if ended and ended[0] is lot[0]:
            del ended[: len(lot)]


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
