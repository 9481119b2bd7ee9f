"""View `future`: calls that did not block, from sending to the moment when somebody asked for the result.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.1, §2.3.7
"""

from __future__ import annotations

from minivllm.exceptions import ConfigError
from minivllm.timeline import text as words
from minivllm.timeline.batches import queue_size
from minivllm.timeline.run import Run
from minivllm.timeline.view import Kind, Row, Segment, View
from minivllm.trace_store import Span

_SHOWN = 10


def applies(run: Run) -> bool:
    """Whether futures of several batches were pending at once."""
    return queue_size(run) > 1 and bool(run.all("future.result"))


def build(run: Run) -> View:
    view = View("future", "Calls in flight and their futures")
    results = {int(s.get("seq") or 0): s for s in run.all("future.result")}
    calls = [s for s in run.all("rpc.call") if int(s.get("seq") or 0) in results]
    if not calls:
        view.missing.append(run.missing("rpc", "futures: calls that did not block"))
        return view
    first = _first(run, calls)
    shown = calls[first : first + _SHOWN]
    first_seq, last_seq = shown[0].get("seq"), shown[-1].get("seq")
    numbers = f"Calls {first_seq} to {last_seq}" if len(shown) > 1 else f"Call {first_seq}"
    view.title = f"{numbers}: sent, pending, asked for"
    view.waiting = "pending, and nobody asks"
    view.rows.append(run.heading(shown[0].process))
    for call in shown:
        seq = int(call.get("seq") or 0)
        result = results[seq]
        row = Row(
            f"{seq} {call.attributes.get('rpc.method', '')}", run.actor(call.process), 1, span_id=call.span_id
        )
        row.segments = [Segment(run.at(call.start_ns), run.at(call.end_ns))]
        if result.start_ns > call.end_ns:
            row.segments.append(Segment(run.at(call.end_ns), run.at(result.start_ns), Kind.WAIT, "pending"))
        row.segments.append(Segment(run.at(result.start_ns), run.at(result.end_ns), label="result()"))
        view.rows.append(row)
    view.fit()
    view.zero_ns = view.start_ns
    view.explanation = _explain(calls, results)
    return view


def _first(run: Run, calls: list[Span]) -> int:
    focus = run.options.focus
    if focus is None:
        return max(0, len(calls) // 2 - _SHOWN // 2)
    for index, call in enumerate(calls):
        if str(call.get("seq")) == focus or (len(focus) >= 4 and call.span_id.startswith(focus.lower())):
            return index
    raise ConfigError(
        f"--focus {focus}: no such call in this trace; those with a future are numbered {calls[0].get('seq')} to "
        f"{calls[-1].get('seq')}"
    )


def _explain(calls: list[Span], results: dict[int, Span]) -> list[str]:
    moments = sorted(
        [(call.start_ns, 1) for call in calls] + [(results[int(c.get("seq") or 0)].end_ns, -1) for c in calls]
    )
    pending = most = 0
    for _, change in moments:
        pending += change
        most = max(most, pending)
    ends = [results[int(call.get("seq") or 0)].end_ns for call in calls]
    drained = sum(int(result.get("drained") or 0) for result in results.values())
    together = f"; up to {most} of them were pending at once" if len(calls) > 1 else ""
    sentences = [
        "a bar is the sending, then the time in which the call is pending and nobody asks, then the wait in result()",
        f"{words.count(len(calls), 'call')} did not block{together}",
    ]
    if len(calls) > 1 and ends == sorted(ends):
        sentences.append("their results were taken in the order in which they were sent")
    if drained:
        sentences.append(
            f"asking for a later result finished {words.count(drained, 'older call')} on the way"
        )
    asked = sorted(results[int(c.get("seq") or 0)].start_ns - c.end_ns for c in calls)
    median = " (median)" if len(asked) > 1 else ""
    sentences.append(
        f"a call was pending for {words.duration(max(asked[len(asked) // 2], 0))}{median} before its result was asked for"
    )
    return sentences
