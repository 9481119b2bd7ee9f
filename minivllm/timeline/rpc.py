"""View `rpc`: one collective_rpc from the broadcast to the last response.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.3.7, §2.4.10–§2.4.13, §2.5.2
"""

from __future__ import annotations

from minivllm.exceptions import ConfigError
from minivllm.timeline import meetings
from minivllm.timeline import text as words
from minivllm.timeline.messages import Messages, dequeue_row, slot_text, written_ns
from minivllm.timeline.run import Run
from minivllm.timeline.view import Row, View
from minivllm.trace_store import Process, Span

_MARGIN = 0.03
# Waiting in collectives shorter than this share of the picture is not worth a sentence.
_WORTH_SAYING = 0.02


def build(run: Run) -> View:
    view = View("rpc", "One broadcast and its responses")
    calls = run.all("rpc.call")
    if not calls:
        view.missing.append(run.missing("rpc", "rpc spans"))
        return view
    call = _choose(run, calls)
    method = method_of(call)
    seq = call.get("seq")
    number = f" number {seq}" if seq is not None else ""
    view.title = (
        f"One broadcast and its responses: {method}, call{number}, {words.instant(run.at(call.start_ns), 3)} "
        "after the start of the run"
    )
    executions = sorted(
        (s for s in run.store.children(call) if s.name == "rpc.execute"), key=lambda s: s.rank or 0
    )
    results = [s for s in run.all("future.result", call.process) if seq is not None and s.get("seq") == seq]
    enqueue = next((s for s in run.store.children(call) if s.name == "mq.enqueue"), None)
    last = max(s.end_ns for s in [call, *executions, *results])
    messages = Messages(run, call.start_ns, last)
    inside = [s for execution in executions for s in run.below(execution)]
    waits = meetings.collectives(run, inside)
    view.rows += _caller_rows(run, call, results, enqueue, messages)
    for process in run.workers:
        view.rows += _worker_rows(run, process, executions, enqueue, messages, meetings.until(waits))
    margin = round((last - call.start_ns) * _MARGIN)
    view.start_ns, view.end_ns = run.at(call.start_ns) - margin, run.at(last) + margin
    view.zero_ns = run.at(call.start_ns)
    view.explanation = _explain(run, call, results, executions, enqueue, messages)
    view.explanation += meetings.sentences(inside, waits, (last - call.start_ns) * _WORTH_SAYING)
    if enqueue is None:
        view.missing.append(run.missing("message", "queue messages (slot, size, who read when)"))
    return view


def method_of(span: Span) -> str:
    return str(span.attributes.get("rpc.method") or span.get("method") or "a call")


def _choose(run: Run, calls: list[Span]) -> Span:
    """The call in focus; by default an execute_model in the middle of the run, which is a decode step."""
    focus = run.options.focus
    if focus is None:
        steps = [c for c in calls if method_of(c) == "execute_model" and not c.is_error] or calls
        return steps[len(steps) // 2]
    for call in calls:
        if str(call.get("seq")) == focus or (len(focus) >= 4 and call.span_id.startswith(focus.lower())):
            return call
    if len(focus) >= 4:
        for span in run.store.spans():
            if span.span_id.startswith(focus.lower()):
                inside = [c for c in run.below(span) if c.name == "rpc.call"]
                around = [c for c in calls if c.start_ns <= span.start_ns and span.end_ns <= c.end_ns]
                if inside or around:
                    return min(inside or around, key=lambda c: c.start_ns)
    numbers = [int(n) for c in calls if (n := c.get("seq")) is not None]
    known = (
        f"calls are numbered {min(numbers)} to {max(numbers)}"
        if numbers
        else f"the run has {len(calls)} calls"
    )
    raise ConfigError(f"--focus {focus}: no such RPC in this trace; {known}")


def _caller_rows(
    run: Run, call: Span, results: list[Span], enqueue: Span | None, messages: Messages
) -> list[Row]:
    """The call, and for a call that did not block the future through which its reply was fetched."""
    rows = [run.heading(call.process), run.row(call, 1, f"rpc.call {method_of(call)}")]
    for child in run.store.children(call):
        if child.process is not call.process:
            continue
        row = run.row(child, 2)
        if child is enqueue and slot_text(child):
            row.label = f"mq.enqueue {slot_text(child)}"
        rows += [row, *_reply_rows(run, child, 3, messages)]
    for result in results:
        rows += [run.row(result, 1), *_reply_rows(run, result, 2, messages)]
    return rows


def _reply_rows(run: Run, waiting: Span, depth: int, messages: Messages) -> list[Row]:
    rows = []
    for response in run.store.children(waiting):
        sender = messages.sender.get(response.span_id)
        if response.name == "mq.dequeue" and sender is not None:
            rows.append(dequeue_row(run, response, sender, depth, f"mq.dequeue from rank {sender.rank}"))
    return rows


def _worker_rows(
    run: Run,
    process: Process,
    executions: list[Span],
    enqueue: Span | None,
    messages: Messages,
    waits: dict[str, int],
) -> list[Row]:
    rows: list[Row] = []
    if enqueue is not None:
        for dequeue in messages.read(enqueue):
            if dequeue.process is process:
                rows.append(dequeue_row(run, dequeue, enqueue, 1))
    for execution in executions:
        if execution.process is process:
            rows += run.tree(execution, 1, waits, process)
    return [run.heading(process), *rows] if rows else []


def _explain(
    run: Run,
    call: Span,
    results: list[Span],
    executions: list[Span],
    enqueue: Span | None,
    messages: Messages,
) -> list[str]:
    sentences: list[str] = []
    if enqueue is not None:
        readers = messages.read(enqueue)
        arrivals = [
            f"rank {s.rank} had it {words.duration(max(0, s.end_ns - written_ns(enqueue)))} after it was written"
            for s in readers[:4]
        ]
        where = slot_text(enqueue)
        sentences.append(
            f"the message ({where or 'one slot of the ring'}) was written once, in "
            f"{words.duration(enqueue.end_ns - enqueue.start_ns)}, and read by "
            f"{words.count(len(readers), 'rank')}" + (f": {words.listing(arrivals)}" if arrivals else "")
        )
    if executions:
        by_length = sorted(executions, key=lambda s: s.end_ns - s.start_ns)
        slow, fast = by_length[-1], by_length[0]
        text = f"rank {slow.rank} executed for {words.duration(slow.end_ns - slow.start_ns)}"
        if slow is not fast:
            text += (
                f", rank {fast.rank} for {words.duration(fast.end_ns - fast.start_ns)}; the last to finish was "
                f"rank {max(executions, key=lambda s: s.end_ns).rank}"
            )
        sentences.append(text)
    sentences += _replies(run, executions, messages)
    sentences += _waited(run, call, results)
    if call.is_error:
        sentences.append(
            f"the call failed: {call.status_message.splitlines()[0] if call.status_message else 'no message'}"
        )
    return sentences


def _replies(run: Run, executions: list[Span], messages: Messages) -> list[str]:
    ran = {s.rank for s in executions if s.rank is not None}
    # Each rank's first message back after its execution has begun is its reply.
    replied = {s.rank for s in messages.sender.values() if s.process.role == "worker" and s.rank in ran}
    if not replied:
        return []
    text = f"{words.ranks([r for r in replied if r is not None])} replied"
    silent = sorted(ran - replied)
    if silent:
        stages = {e.rank: _stage(run, e.process) for e in executions}
        spoken = {stages.get(rank) for rank in replied}
        twins = [rank for rank in silent if stages.get(rank) in spoken]
        others = [rank for rank in silent if rank not in twins]
        parts = [f"{words.ranks(twins)} computed the same"] if twins else []
        parts += [f"{words.ranks(others)} computed another stage"] if others else []
        text += f"; {words.listing(parts)}" + ("; they" if len(parts) > 1 else " and") + " sent nothing back"
    return [text]


def _waited(run: Run, call: Span, results: list[Span]) -> list[str]:
    """How long the caller waited, and what a call that did not block gained by that."""
    name = run.actor(call.process).name
    waits = [s for s in run.store.children(call) if s.name == "rpc.await_responses"]
    if waits:
        waited = sum(s.end_ns - s.start_ns for s in waits)
        share = waited / max(call.end_ns - call.start_ns, 1)
        return [f"{name} waited {words.duration(waited)} for it, {share:.0%} of the call"]
    if results:
        first = results[0]
        text = (
            f"the call did not block: it returned a future after {words.duration(call.end_ns - call.start_ns)}, and "
            f"{name} asked for the result {words.duration(max(0, first.start_ns - call.end_ns))} later and waited "
            f"{words.duration(first.end_ns - first.start_ns)}"
        )
        return [text]
    return []


def _stage(run: Run, process: Process) -> str:
    """The pipeline stage of a worker, which is in its name where there are several."""
    return next((part for part in run.actor(process).name.split("_") if part.startswith("PP")), "")
