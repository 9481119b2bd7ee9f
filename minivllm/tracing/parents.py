"""Which span a new span belongs to when its own thread has none open.

vLLM 0.25.1: vllm/tracing/otel.py (_get_smart_context)
Articles: part 2 §2.4.8
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.tracing import context

if TYPE_CHECKING:
    from minivllm.tracing.spans import Span


class Parents:
    """The outer context of this process.

    Attributes:
        inherited: the span of the process that started this one (TRACEPARENT).
        forked_from: what was open in the parent at the moment of a fork.
        roots: open spans of this process that adopt what threads without an open span record.
    """

    def __init__(self) -> None:
        self.inherited: context.Parent | None = None
        self.forked_from: context.Parent | None = None
        self.roots: list[Span] = []
        self._trace_id = b""

    def default(self) -> context.Parent | None:
        """An open root of this process, else what it inherited."""
        if self.roots:
            root = self.roots[-1]
            return root.trace_id, root.span_id
        return self.inherited

    def find(self, packed: bytes | None, name: str) -> context.Parent:
        """Trace id and parent id of a span; parent id 0 makes it the root of its trace.

        Args:
            packed: the parent that the caller gave, if any.
        """
        if packed:
            return context.unpack(packed)
        if name == "run":
            # A run is a trace of its own unless the caller has one; an older run still open is no parent.
            caller = context.active_opentelemetry_parent() or self.inherited
            return caller or (context.new_trace_id(), 0)
        parent = self.default()
        if parent is None:
            self._trace_id = self._trace_id or context.new_trace_id()
            return self._trace_id, 0
        return parent

    def forget(self, parent: context.Parent | None) -> None:
        """In a forked child: the span that was open in the parent is the outer context from now on."""
        self.roots.clear()
        if parent is not None:
            self.inherited = self.forked_from = parent


parents = Parents()
