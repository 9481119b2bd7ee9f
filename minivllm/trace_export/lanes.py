"""Where each span is drawn: a process, a thread of it, and there a depth, so that nothing covers anything else.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.timeline.run import Run
from minivllm.trace_store import Process, Span, TraceStore


@dataclass(slots=True, eq=False)
class Lane:
    """One track: spans that either do not overlap or contain each other.

    Attributes:
        name: the thread's, with a number where a thread's spans need more than one track.
        thread_id: of the operating system, 0 if unknown.
        extra: 0 for the thread's first track, 1, 2 … for those beside it.
        spans: with their depths, in order of their start.
    """

    process: Process
    name: str
    thread_id: int
    extra: int = 0
    spans: list[tuple[Span, int]] = field(default_factory=list)
    _open: list[Span] = field(default_factory=list)

    def take(self, span: Span) -> bool:
        """Add a span that begins after all others here, unless it would cover a part of one of them."""
        while self._open and self._open[-1].end_ns <= span.start_ns:
            # What has no duration may still be open for others at the same moment.
            self._open.pop()
        if self._open and span.end_ns > self._open[-1].end_ns:
            return False
        self.spans.append((span, len(self._open)))
        self._open.append(span)
        return True

    @property
    def depth(self) -> int:
        """How many rows it takes to draw."""
        return 1 + max((depth for _, depth in self.spans), default=0)


def lanes_of(store: TraceStore) -> list[Lane]:
    """All tracks: processes in the order client, EngineCore, workers by rank; the main thread first."""
    run = Run(store)
    found: dict[tuple[Process, object], list[Lane]] = {}
    # Of spans that begin together the longer one is the outer one.
    for span in sorted(store.spans(), key=lambda span: (span.start_ns, -span.end_ns)):
        thread_id = span.attributes.get("thread.id", 0)
        tracks = found.setdefault((span.process, thread_id), [])
        for lane in tracks:
            if lane.take(span):
                break
        else:
            name = str(span.attributes.get("thread.name", "thread"))
            lane = Lane(span.process, name, int(thread_id), len(tracks))
            if tracks:
                lane.name = f"{name} ({len(tracks) + 1})"
            lane.take(span)
            tracks.append(lane)
    lanes = [lane for tracks in found.values() for lane in tracks]

    def order(lane: Lane) -> tuple[int, int, bool, int, int]:
        process = lane.process
        is_main = lane.name.startswith("MainThread") or lane.thread_id == process.pid
        return run.actor(process).slot, process.pid, not is_main, lane.thread_id, lane.extra

    return sorted(lanes, key=order)
