"""Reading a recorded run: merging, queries, other formats, speed."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from minivllm import tracing
from minivllm.exceptions import ConfigError
from minivllm.trace_store import TraceStore
from tests.trace_fixtures import Run, write_run
from tests.tracing_helpers import recording, store_of


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TraceStore:
    """A run of this process with nested steps, an error, events and links."""
    directory = tmp_path_factory.mktemp("run")
    with recording(directory, "message"):
        with tracing.span("run", model="tiny") as run, tracing.span("engine_core.init", size=2):
            for number in range(3):
                with tracing.span("engine_core.step", step=number), tracing.span("rpc.call", seq=number):
                    with tracing.span("mq.enqueue") as send:
                        send.event("copied", bytes=10)
                    with tracing.span("mq.dequeue", links=(send.context,)):
                        pass
            with pytest.raises(OSError, match="gone"), tracing.span("executor.shutdown"):
                with tracing.span("executor.terminate_graceful"):
                    raise OSError("gone")
            run.set(done=True)
    return store_of(directory)


def test_queries(store: TraceStore) -> None:
    assert [span.get("step") for span in store.spans("engine_core.step")] == [0, 1, 2]
    (process,) = store.processes()
    assert process.role == "client" and process.rank is None and process.service == "minivllm.client"
    assert store.spans(process=process) == store.spans(process="client") == store.spans()
    assert store.spans(process="worker") == store.spans(rank=0) == []
    starts = [span.start_ns for span in store.spans()]
    assert starts == sorted(starts)
    root = store.root
    assert root is not None and root.name == "run" and root.get("done") is True
    assert [child.name for child in store.children(root)] == ["engine_core.init"]
    call = store.spans("rpc.call")[1]
    assert store.span(call.span_id) is call
    assert [child.name for child in store.children(call)] == ["mq.enqueue", "mq.dequeue"]
    send, receive = store.children(call)
    assert receive.links[0].span_id == send.span_id and receive.links[0].trace_id == store.trace_id
    assert send.events[0].attributes == {"minivllm.bytes": 10}
    assert store.orphans() == []
    with pytest.raises(KeyError):
        store.span("0" * 16)


def test_tree_goes_down_in_order(store: TraceStore) -> None:
    walk = [(depth, span.name) for depth, span in store.tree()]
    assert walk[:6] == [
        (0, "run"),
        (1, "engine_core.init"),
        (2, "engine_core.step"),
        (3, "rpc.call"),
        (4, "mq.enqueue"),
        (4, "mq.dequeue"),
    ]
    assert len(walk) == len(store.spans())
    assert [depth for depth, _ in store.tree(store.spans("rpc.call")[0])] == [0, 1, 1]


def test_first_failure_is_the_innermost(store: TraceStore) -> None:
    failure = store.first_failure()
    assert failure is not None and failure.name == "executor.terminate_graceful"
    assert failure.status_message == "OSError: gone"


def _with_base64_ids(item: Any) -> Any:
    """OTLP/JSON has hex ids where protobuf's own JSON has base64."""
    if isinstance(item, dict):
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else _with_base64_ids(value)
            for key, value in item.items()
        }
    return [_with_base64_ids(value) for value in item] if isinstance(item, list) else item


def test_merged_trace_loads_in_opentelemetry_proto(store: TraceStore, tmp_path: Path) -> None:
    store.write_otlp_json(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data == store.to_otlp()
    request = ExportTraceServiceRequest()
    json_format.ParseDict(_with_base64_ids(data), request)
    spans = [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
    assert {span.span_id.hex() for span in spans} == {span.span_id for span in store.spans()}
    by_id = {span.span_id.hex(): span for span in spans}
    for ours in store.spans():
        theirs = by_id[ours.span_id]
        assert (theirs.name, theirs.trace_id.hex()) == (ours.name, ours.trace_id)
        assert theirs.parent_span_id.hex() == ours.parent_span_id
        assert (theirs.start_time_unix_nano, theirs.end_time_unix_nano) == (ours.start_ns, ours.end_ns)
        assert len(theirs.attributes) == len(ours.attributes)
        assert theirs.kind != 0


def test_a_foreign_runs_processes(tmp_path: Path) -> None:
    merged = TraceStore.open(write_run(tmp_path / "run"))
    roles = [process.role for process in merged.processes()]
    assert roles[:2] == ["client", "engine_core"] and set(roles[2:]) == {"worker"}
    assert merged.orphans() == []
    for rank in (0, 1):
        assert all(span.rank == rank for span in merged.spans(rank=rank))
        assert merged.spans("worker.load_model", rank=rank)
    services = [
        {a["key"]: a["value"] for a in group["resource"]["attributes"]}["service.name"]["stringValue"]
        for group in merged.to_otlp()["resourceSpans"]
    ]
    assert services == [process.service for process in merged.processes()]


def test_unfinished_span_survives_conversion(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    with recording(tmp_path), tracing.span("run"):
        pass
    (journal,) = directory.glob("*.journal.jsonl")
    for file in directory.glob("client-*"):
        if file != journal:
            file.unlink()
    merged = TraceStore.open(directory)
    (span,) = merged.spans()
    assert span.unfinished and span.is_error and span.end_ns >= span.start_ns
    (encoded,) = merged.to_otlp()["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {"key": "minivllm.unfinished", "value": {"boolValue": True}} in encoded["attributes"]
    assert encoded["status"]["code"] == 2


def test_no_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        TraceStore.open(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no trace"):
        TraceStore.open(tmp_path)
    (tmp_path / "client-1.jsonl").write_bytes(b"\x00\xff not json\n{}\n")
    (tmp_path / "client-1.open").write_bytes(b"short")
    (tmp_path / "client-1.journal.jsonl").write_bytes(b'{"span":{}}\n')
    with pytest.raises(ConfigError, match="holds no trace"):
        TraceStore.open(tmp_path)
    with recording(tmp_path), tracing.span("run"):
        pass
    with pytest.raises(ConfigError, match="holds no trace abc; it has"):
        TraceStore.open(tmp_path / "trace", trace_id="abc")


def test_hundred_thousand_spans_open_sooner_than_json_reads_them(tmp_path: Path) -> None:
    """A second where nothing else runs, see tests/benchmarks/bench_spans.py; json, at the same moment, takes thrice as long."""
    with recording(tmp_path, "message"), tracing.span("run"):
        for step in range(20_000):
            with tracing.span("engine_core.step", step=step):
                for rank in range(2):
                    with tracing.span("rpc.execute", attrs={"rpc.method": "execute_model"}, rank=rank):
                        with tracing.span(
                            "mq.dequeue", queue="rpc", slot=step % 10, bytes=512, waiting_us=3.5
                        ):
                            pass
    begin = time.process_time()
    big = store_of(tmp_path)
    assert len(big.spans("mq.dequeue")) == 40_000
    assert big.root is not None and len(big.children(big.root)) == 20_000
    assert big.orphans() == []
    elapsed = time.process_time() - begin
    assert len(big.spans()) == 100_001
    text = big.encode_otlp()
    begin = time.process_time()
    assert len(json.loads(text)["resourceSpans"]) == 1
    assert elapsed < (limit := time.process_time() - begin), f"{elapsed:.2f} s, json {limit:.2f} s"


def test_run_without_a_root_shows_the_largest_trace(tmp_path: Path) -> None:
    run = Run(tmp_path / "trace")
    tracer = run.process("worker", 0, 10, "minivllm.worker.tp0")
    tracer.span("worker.main", 0, 1)
    tracer.span("worker.init", 0, 1)
    run.trace_id = "6" * 32
    tracer.span("worker.main", 0, 1)
    merged = TraceStore.open(run.write())
    assert merged.trace_id == "5" * 32 and len(merged.spans()) == 2 and len(merged.trace_ids) == 2


# --- what is missing, or not shown

RUN = Path(__file__).resolve().parents[1] / "docs" / "runs" / "tp2"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["client"], ["no events of the client"]),
        (["engine_core"], ["no events of EngineCore"]),
        (["engine_core", "worker"], ["no events of EngineCore"]),
        (["client", "engine_core"], ["no events of the process that started the workers"]),
        (["worker"], ["no events of rank 0", "no events of rank 1"]),
        ([], []),
    ],
)
def test_a_process_without_files_is_named(gone: list[str], said: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    shutil.copytree(RUN, directory)
    for role in gone:
        for file in directory.glob(f"{role}-*"):
            file.unlink()
    assert TraceStore.open(directory).warnings == said


def test_a_run_that_is_not_shown_is_mentioned(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    shutil.copytree(RUN, directory)
    shutil.copytree(RUN.parent / "runner-v1", directory, dirs_exist_ok=True)
    store = TraceStore.open(directory)
    assert store.warnings == ["this is run 2 of the 2 that the directory holds"] and store.number == 2
    for number, alone in enumerate(sorted((RUN, RUN.parent / "runner-v1"), key=_start), start=1):
        chosen = TraceStore.open(directory, number=number)
        assert (
            chosen.number == number
            and chosen.warnings == []
            and chosen.trace_id == TraceStore.open(alone).trace_id
        )
        assert len(chosen.spans()) == len(TraceStore.open(alone).spans())
    for number in (0, 3, -1):
        with pytest.raises(ConfigError, match=f"has no run {number}: it holds 2 runs"):
            TraceStore.open(directory, number=number)


def _start(directory: Path) -> int:
    return TraceStore.open(directory).spans()[0].start_ns


def test_files_without_anything_readable_are_not_called_no_trace(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    directory.mkdir()
    with pytest.raises(ConfigError, match="holds no trace; record one"):
        TraceStore.open(directory)
    for name in ("client-7.jsonl", "client-7.journal.jsonl"):
        (directory / name).write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"no trace that can be read: client-7.journal.jsonl is empty, and nothing in 1 other file",
    ):
        TraceStore.open(directory)
    for name in ("client-7.jsonl", "client-7.journal.jsonl"):
        (directory / name).write_bytes(bytes(range(1, 250)))
    with pytest.raises(ConfigError, match=r"can be read: \d+ lines unreadable in client-7.journal.jsonl"):
        TraceStore.open(directory)


def test_a_foreign_file_is_not_one_of_ours_that_is_cut_off(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    shutil.copytree(RUN, directory)
    (directory / "other-1.jsonl").write_text('{"x":1}\n')
    assert TraceStore.open(directory).warnings == ["1 line unreadable in other-1.jsonl"]


def test_a_step_of_which_only_the_beginning_is_known_has_no_length(tmp_path: Path) -> None:
    from minivllm.timeline import build_views
    from minivllm.timeline.render import _note

    directory = tmp_path / "trace"
    shutil.copytree(RUN, directory)
    for file in directory.glob("client-*.jsonl"):
        lines = file.read_bytes().splitlines(keepends=True)
        if "journal" in file.name:
            kept = next(i for i, line in enumerate(lines) if b"engine_core.spawn" in line)
            file.write_bytes(b"".join(lines[: kept + 1]))
        else:
            file.write_bytes(lines[0][:500])
    store = TraceStore.open(directory)
    assert len(store.warnings) == 1 and store.warnings[0].endswith("is cut off")
    (view,) = build_views(store, ["spawn"])
    assert _note(next(row for row in view.rows if row.label == "engine_core.spawn")) == "never finished"
