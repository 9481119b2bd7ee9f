"""From the records of each process to spans that all have an end.

vLLM 0.25.1: none
Articles: part 2 §2.6
"""

from __future__ import annotations

import signal

import msgspec

from minivllm.trace_store.files import ProcessRecord
from minivllm.trace_store.model import Process, RawSpan, Span
from minivllm.tracing.encode import KINDS
from minivllm.tracing.open_table import TableEntry
from minivllm.tracing.spec import WORKER


def spans_of(record: ProcessRecord) -> list[Span]:
    """All spans of one process. Those that its files do not end have end_ns 0.

    The file of finished spans says most. What it lacks comes from the journal (with attributes), and from the
    table, which also knows when a span ended that a kill kept from the file.
    """
    process = record.process
    spans = [Span(raw, process) for raw in record.finished.values()]
    table = {entry.span_id: entry for entry in record.table}
    for span_id, raw in record.started.items():
        if span_id not in record.finished:
            entry = table.get(span_id)
            spans.append(_incomplete(Span(raw, process, recovered=True), entry.end_ns if entry else 0))
    for span_id, entry in table.items():
        if span_id not in record.finished and span_id not in record.started:
            spans.append(_incomplete(Span(_from_table(entry), process, recovered=True), entry.end_ns))
    for span in spans:
        if span.start_ns:
            process.start_ns = min(process.start_ns or span.start_ns, span.start_ns)
        process.end_ns = max(process.end_ns, span.end_ns, span.start_ns)
    return spans


def _incomplete(span: Span, end_ns: int) -> Span:
    if end_ns:
        span.finish(end_ns, "", recovered=True)
    return span


def _from_table(entry: TableEntry) -> RawSpan:
    from minivllm.tracing.catalogue import SPANS

    return RawSpan(
        traceId=entry.trace_id,
        spanId=entry.span_id,
        parentSpanId=entry.parent_span_id,
        name=entry.name,
        kind=KINDS[SPANS[entry.name].kind],
        startTimeUnixNano=str(entry.start_ns),
        attributes=msgspec.Raw(f"[{entry.attributes}]".encode()),
    )


def finish_open_spans(spans: list[Span]) -> None:
    """Give an end to the spans of processes that ended within them, with the truth about that end.

    The parent knows best when and how a worker ended; without it the last moment known of the process counts.
    """
    deaths = [span for span in spans if span.name == "worker.process" and span.end_ns]
    for span in spans:
        if span.end_ns:
            continue
        process = span.process
        if process.alive:
            span.finish(process.end_ns, "", open=True)
            continue
        death = next((death for death in deaths if _is_about(death, process)), None)
        end_ns = process.end_ns if death is None else max(death.end_ns, process.end_ns)
        how = "ended" if death is None else _how_it_ended(death)
        span.finish(
            end_ns, f"unfinished: {process.label} (pid {process.pid}) {how} in this step", unfinished=True
        )


def _is_about(death: Span, process: Process) -> bool:
    if process.role != WORKER or death.process is process:
        return False
    pid = death.attributes.get("process.pid", death.get("pid"))
    return bool(pid == process.pid if pid is not None else death.get("rank") == process.rank)


def _how_it_ended(death: Span) -> str:
    code = death.attributes.get("process.exit.code", death.get("exit_code"))
    if death.get("ended"):
        return str(death.get("ended"))
    if code is None:
        return "ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
