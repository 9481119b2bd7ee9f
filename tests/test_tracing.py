"""The span API within one process: recording, context, files, the step board."""

from __future__ import annotations

import contextlib
import dis
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from minivllm import tracing
from minivllm.exceptions import ConfigError
from minivllm.trace_store import TraceStore
from minivllm.tracing import board, context
from minivllm.tracing.recorder import recorder
from tests.tracing_helpers import recording, run_script, store_of


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MINIVLLM_", "OTEL_")) or name == "TRACEPARENT":
            monkeypatch.delenv(name)


# --- recording


def test_a_span_keeps_what_it_was_given(tmp_path: Path) -> None:
    with recording(tmp_path), tracing.span("run", model="tiny") as run:
        with tracing.span("rpc.call", attrs={"rpc.method": "echo"}, seq=7, ranks=[0, 1]) as call:
            call.set(reply=True, nothing=None)
            call.set({"error.type": "none"})
            call.event("sent", rank=1)
            call.link(run.context)
    store = store_of(tmp_path)
    span = store.spans("rpc.call")[0]
    assert span.kind == "client"
    assert span.attributes["rpc.method"] == "echo"
    assert span.attributes["error.type"] == "none"
    assert (span.get("seq"), span.get("ranks"), span.get("reply")) == (7, [0, 1], True)
    assert "minivllm.nothing" not in span.attributes
    assert [(event.name, event.attributes) for event in span.events] == [("sent", {"minivllm.rank": 1})]
    assert span.start_ns <= span.events[0].time_ns <= span.end_ns
    assert store.parent(span) is store.root
    assert [link.span_id for link in span.links] == [store.spans("run")[0].span_id]
    assert span.attributes["thread.name"] == "MainThread"
    assert span.attributes["thread.id"] == threading.get_native_id()
    assert span.attributes["code.file.path"] == "tests/test_tracing.py"
    assert span.attributes["code.function.name"].endswith("test_a_span_keeps_what_it_was_given")


def test_a_span_of_the_hot_path_is_like_any_other(tmp_path: Path) -> None:
    """The first of its name takes the other way in; what it is given, adds, meets and leads to must be the same."""
    memory = memoryview(bytearray(board.BOARD_BYTES))
    with recording(tmp_path, "message"), tracing.span("run") as run:
        tracing.attach_board(memory)
        for number in range(3):
            given = {"seq": number, "rpc.method": "echo"}
            with tracing.hot_span("rpc.call", given) as call, tracing.hot_span("mq.enqueue") as sent:
                assert call.recording and sent.recording and not call.end_ns
                given["late"] = True
                assert board.read_board(memory) == ["run", "rpc.call"], "messages are not shown there"
                sent.set(bytes=5)
                sent.link(run.context)
            assert call.end_ns > call.start_ns and not call.recording
            call.end()
            with (
                pytest.raises(ValueError, match="no such"),
                tracing.hot_span("rpc.execute", None, call.context),
            ):
                raise ValueError("no such method")
        tracing.detach_board()
    store = store_of(tmp_path)
    calls, sends = store.spans("rpc.call"), store.spans("mq.enqueue")
    executions = store.spans("rpc.execute")
    for number, (call_span, send, execution) in enumerate(zip(calls, sends, executions, strict=True)):
        assert (call_span.get("seq"), call_span.get("late")) == (number, True)
        assert call_span.attributes["rpc.method"] == "echo"
        assert store.parent(send) is call_span and store.parent(execution) is call_span
        assert send.get("bytes") == 5 and [link.span_id for link in send.links] == [store.root.span_id]
        assert execution.is_error and execution.attributes["error.type"] == "ValueError"
        assert not call_span.unfinished and call_span.end_ns >= send.end_ns


def test_file_is_otlp_json(tmp_path: Path) -> None:
    with recording(tmp_path), tracing.span("run", n=1 << 70, x=0.5, far=float("inf"), raw=b"ab", d={"k": 1}):
        pass
    path = tmp_path / "trace" / f"client-{os.getpid()}.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    resource = {a["key"]: a["value"] for a in line["resourceSpans"][0]["resource"]["attributes"]}
    assert resource["service.name"] == {"stringValue": "minivllm.client"}
    assert resource["process.pid"] == {"intValue": str(os.getpid())}
    span = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert len(span["traceId"]) == 32 and span["traceId"] == span["traceId"].lower()
    assert len(span["spanId"]) == 16
    assert span["kind"] == 1
    assert isinstance(span["startTimeUnixNano"], str)
    assert abs(int(span["endTimeUnixNano"]) - time.time_ns()) < 60e9
    values = {a["key"]: a["value"] for a in span["attributes"]}
    assert values["minivllm.n"] == {"stringValue": str(1 << 70)}
    assert values["minivllm.x"] == {"doubleValue": 0.5}
    assert values["minivllm.far"] == {"doubleValue": "Infinity"}
    assert values["minivllm.raw"] == {"bytesValue": "YWI="}
    assert values["minivllm.d"]["kvlistValue"]["values"] == [{"key": "k", "value": {"intValue": "1"}}]


def test_no_machine_path_in_the_file(tmp_path: Path) -> None:
    with recording(tmp_path), tracing.span("run"):
        pass
    root = str(Path(tracing.__file__).parents[2])
    assert all(root not in path.read_text() for path in (tmp_path / "trace").glob("*.jsonl"))


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_strange_values_do_not_stop_the_recorder(tmp_path: Path) -> None:
    with recording(tmp_path):
        with tracing.span("run", a=Unprintable(), b="\ud800 lone", c={3, 1}, d=object, e=tracing.LEVEL_NAMES):
            pass
    attributes = store_of(tmp_path).spans("run")[0].attributes
    assert "Unprintable" in attributes["minivllm.a"]
    assert attributes["minivllm.c"] == ["1", "3"]
    assert attributes["minivllm.e"] == list(tracing.LEVEL_NAMES)


@pytest.mark.parametrize(
    ("level", "recorded"),
    [
        ("lifecycle", {"run"}),
        ("rpc", {"run", "rpc.call"}),
        ("message", {"run", "rpc.call", "mq.enqueue"}),
    ],
)
def test_levels(tmp_path: Path, level: str, recorded: set[str]) -> None:
    with recording(tmp_path, level):
        assert tracing.active and tracing.LEVEL_NAMES[tracing.level] == level
        with tracing.span("run"), tracing.span("rpc.call") as call, tracing.span("mq.enqueue"):
            assert call.recording == ("rpc.call" in recorded)
            # What is sent from within a step that is not recorded belongs to the recorded one around it.
            assert len(tracing.pack_context()) == 25
    assert {span.name for span in store_of(tmp_path).spans()} == recorded


def test_off_records_nothing_and_knows_no_names() -> None:
    assert not tracing.active and tracing.level == tracing.OFF
    with tracing.span("rpc.call", seq=1) as span, tracing.span("no.such.span"):
        span.set(a=1)
        span.event("x")
        assert not span.recording
    with tracing.span("worker.init_device") as step:
        assert step.context == b""
    assert tracing.pack_context() == b""
    assert tracing.current_span().context == b""
    tracing.start_span("worker.process").end()


def test_unknown_name_is_an_error_while_tracing(tmp_path: Path) -> None:
    with recording(tmp_path, "lifecycle"):
        for make in (tracing.span, tracing.start_span, tracing.instrument):
            with pytest.raises(KeyError, match="catalogue"):
                make("no.such.span")
        with tracing.span("rpc.call"), tracing.start_span("request"):
            pass


def test_exception_is_recorded_and_goes_on(tmp_path: Path) -> None:
    with recording(tmp_path):
        with pytest.raises(ConfigError, match="bad"), tracing.span("run"), tracing.span("rpc.call"):
            raise ConfigError("bad value")
        with pytest.raises(SystemExit), tracing.span("worker.busy_loop"):
            raise SystemExit(3)
    store = store_of(tmp_path)
    call = store.spans("rpc.call")[0]
    assert call.is_error and call.status_message == "minivllm.exceptions.ConfigError: bad value"
    assert call.attributes["error.type"] == "minivllm.exceptions.ConfigError"
    (event,) = call.events
    assert event.attributes["exception.message"] == "bad value"
    assert "Traceback" in event.attributes["exception.stacktrace"]
    assert store.first_failure() is call
    loop = TraceStore.open(tmp_path / "trace", trace_id=_other_trace(store)).spans("worker.busy_loop")[0]
    assert not loop.is_error and loop.get("ended_by") == "SystemExit"


def _other_trace(store: TraceStore) -> str:
    return next(trace_id for trace_id in store.trace_ids if trace_id != store.trace_id)


@pytest.mark.parametrize("live", [False, True])
def test_a_signal_that_raises_leaves_no_step_open(tmp_path: Path, live: bool) -> None:
    """SystemExit or KeyboardInterrupt of a signal handler can come where Python looks for signals: also in an __exit__.

    That step's context may be with another process already. So the step must be in the trace, and those around it
    must be themselves again. Here it comes at each of these places in turn.
    """
    made: list[bytes] = []

    def steps() -> None:
        with tracing.hot_span("executor.execute_model", {"x": 1}) as step:
            made.append(step.context)
            with tracing.hot_span("rpc.call") as call:
                made.append(call.context)
                call.event("sent")
        with tracing.span("executor.shutdown") as shutdown:
            made.append(shutdown.context)

    exporter = InMemorySpanExporter()
    with recording(tmp_path):
        if live:
            tracing.add_exporter(exporter)
        places = interrupted_everywhere(steps)
    assert places > 40
    store = store_of(tmp_path)
    assert not store.orphans()
    spans = {span.span_id: span for span in store.spans()}
    assert len(made) == len({context.unpack(packed)[1] for packed in made}) > 2 * places
    for packed in made:
        assert not spans[f"{context.unpack(packed)[1]:016x}"].unfinished
    if live:
        given = {span.context.span_id for span in exporter.get_finished_spans() if span.context is not None}
        assert not {context.unpack(packed)[1] for packed in made} - given


def interrupted_everywhere(steps: Callable[[], None]) -> int:
    """Run steps with SystemExit at each place in turn, and once without; returns how many places there are."""
    places = 0
    with tracing.span("run") as run:
        steps()
        while (place := raising_at(places, steps)) is not None:
            assert tracing.current_span() is run, place
            places += 1
    return places


def raising_at(place: int, steps: Callable[[], None]) -> str | None:
    """Run steps within a step, with SystemExit at one of the places in tracing's code where Python looks for signals.

    Returns which it was; None when there are not so many.
    """
    seen = -1
    where = None

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen, where
        code = frame.f_code
        if event == "call":
            if Path(code.co_filename).parent.name != "tracing":
                return None
            frame.f_trace_opcodes = True
            # Where a function begins.
            looks = True
        else:
            # Behind a call.
            before = frame.f_lasti - 2
            while before > 0 and dis.opname[code.co_code[before]] == "CACHE":
                before -= 2
            looks = event == "opcode" and dis.opname[code.co_code[before]].startswith("CALL")
        if looks:
            seen += 1
            if seen == place:
                where = f"{code.co_filename}:{frame.f_lineno}"
                raise SystemExit
        return trace

    with contextlib.suppress(SystemExit), tracing.span("engine_core.step"):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            steps()
        finally:
            sys.settrace(before)
    return where


def test_decorator(tmp_path: Path) -> None:
    @tracing.instrument("worker.load_model", source="disk")
    def load(path: str) -> str:
        """Load."""
        tracing.current_span().set(path=path)
        return path.upper()

    assert load("a") == "A" and load.__doc__ == "Load."
    with recording(tmp_path), tracing.span("run"):
        load("b")
        load("c")
    spans = store_of(tmp_path).spans("worker.load_model")
    assert [(span.get("source"), span.get("path")) for span in spans] == [("disk", "b"), ("disk", "c")]
    assert spans[0].attributes["code.function.name"].endswith("load")
    assert spans[0].attributes["code.line.number"] == load.__wrapped__.__code__.co_firstlineno


def test_span_that_ends_in_another_thread(tmp_path: Path) -> None:
    with recording(tmp_path):
        run = tracing.start_span("run")
        process = tracing.start_span("worker.process", parent=run.context, rank=0)
        assert tracing.current_span().context == b"" or tracing.current_span() is not process
        thread = threading.Thread(target=lambda: (process.set(exit_code=0), process.end(), process.end()))
        thread.start()
        thread.join()
        process.end()
        run.end()
    store = store_of(tmp_path)
    (span,) = store.spans("worker.process")
    assert span.get("exit_code") == 0 and store.parent(span) is store.root


def test_threads_without_a_span_belong_to_the_run(tmp_path: Path) -> None:
    def work() -> None:
        with tracing.span("rpc.call"):
            pass

    with recording(tmp_path):
        run = tracing.start_span("run")
        thread = threading.Thread(target=work, name="Monitor")
        thread.start()
        thread.join()
        run.end()
    store = store_of(tmp_path)
    span = store.spans("rpc.call")[0]
    assert store.parent(span) is store.root
    assert span.attributes["thread.name"] == "Monitor"


def test_open_at_shutdown_is_written_as_unfinished(tmp_path: Path) -> None:
    with recording(tmp_path):
        run, request = tracing.start_span("run"), tracing.start_span("request")
    request.end()
    run.end()
    with tracing.span("rpc.call"):
        pass
    store = store_of(tmp_path)
    assert {span.name for span in store.spans()} == {"run", "request"}
    assert all(span.unfinished and span.is_error for span in store.spans())


def test_nothing_is_lost_between_threads(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for index in range(2000):
            with tracing.span("rpc.call", number=number, index=index), tracing.span("rpc.await_responses"):
                pass

    with recording(tmp_path), tracing.span("run"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store = store_of(tmp_path)
    calls = store.spans("rpc.call")
    assert {(span.get("number"), span.get("index")) for span in calls} == {
        (number, index) for number in range(4) for index in range(2000)
    }
    assert all(store.children(call)[0].name == "rpc.await_responses" for call in calls)
    assert store.orphans() == []


def test_ended_spans_can_be_read_at_once(tmp_path: Path) -> None:
    with recording(tmp_path):
        for number in range(3):
            with tracing.span("run"), tracing.span("rpc.call", number=number):
                pass
            (call,) = store_of(tmp_path).spans("rpc.call")
            assert (
                call.get("number") == number
                and not call.recovered
                and call.attributes["code.line.number"] > 0
            )
        assert recorder.idle  # no thread had to do anything


def test_removed_directory_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        import shutil
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="rpc")
        shutil.rmtree(DIR)
        with tracing.span("run"), tracing.span("rpc.call"):
            pass
        tracing.shutdown()
        tracing.configure("client", trace_dir="/dev/full/x", level="rpc")
        """,
    )
    assert result.returncode == 1
    assert "ConfigError: cannot write traces to /dev/full/x" in result.stderr


def test_what_is_mapped_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """A store into a mapped page for which a full disk has no block would kill the process, by SIGBUS."""
    with recording(tmp_path):
        for kind in ("open", "spool", "spans"):
            (path,) = tmp_path.rglob(f"*.{kind}")
            found = path.stat()
            assert found.st_blocks * 512 >= found.st_size > 0, path


def test_configure_again_goes_to_another_directory(tmp_path: Path) -> None:
    tracing.configure("client", trace_dir=str(tmp_path / "a"), level="rpc")
    run = tracing.start_span("run")
    with tracing.span("rpc.call", n=1):
        tracing.configure("client", trace_dir=str(tmp_path / "a"), level="message")
    with tracing.span("rpc.call", n=2):
        tracing.configure("client", trace_dir=str(tmp_path / "b"), level="rpc")
    run.end()
    with tracing.span("run"), tracing.span("rpc.call", n=3):
        pass
    tracing.shutdown()
    assert [s.get("n") for s in TraceStore.open(tmp_path / "a").spans("rpc.call")] == [1]
    assert [s.get("n") for s in TraceStore.open(tmp_path / "b").spans("rpc.call")] == [3]


def test_two_runs_of_one_directory_are_two_traces(tmp_path: Path) -> None:
    for number in range(2):
        with recording(tmp_path), tracing.span("run", number=number), tracing.span("rpc.call"):
            pass
    store = store_of(tmp_path)
    assert len(store.trace_ids) == 2
    assert store.root is not None and store.root.get("number") == 1
    first = TraceStore.open(tmp_path / "trace", trace_id=store.trace_ids[0])
    assert first.root is not None and first.root.get("number") == 0
    assert len(first.spans()) == len(store.spans()) == 2


@pytest.mark.parametrize("level", ["everything", "7"])
def test_bad_level(tmp_path: Path, level: str) -> None:
    with pytest.raises(ConfigError, match="trace level"):
        tracing.configure("client", trace_dir=str(tmp_path), level=level)


# --- context


def test_packed_context_makes_a_child() -> None:
    packed = context.pack(bytes(range(16)), 0xABC)
    assert len(packed) == context.CONTEXT_BYTES == 25
    assert context.unpack(packed) == (bytes(range(16)), 0xABC)
    with pytest.raises(ValueError, match="25 bytes"):
        context.unpack(b"short")


def test_parent_given_as_bytes(tmp_path: Path) -> None:
    with recording(tmp_path):
        with tracing.span("run") as run, tracing.span("engine_core.step"):
            packed = run.context
            with tracing.span("rpc.execute", parent=packed), tracing.span("model.forward"):
                pass
            with tracing.span("rpc.execute", parent=b""):
                pass
    store = store_of(tmp_path)
    first, second = store.spans("rpc.execute")
    assert store.parent(first) is store.root
    assert store.parent(second) is store.spans("engine_core.step")[0]
    assert store.parent(store.spans("model.forward")[0]) is first


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", True),
        (f" 00-{'A' * 32}-{'b' * 16}-00 ", True),
        (f"cc-{'a' * 32}-{'b' * 16}-01-more", True),
        (f"ff-{'a' * 32}-{'b' * 16}-01", False),
        (f"00-{'a' * 32}-{'b' * 16}-01-more", False),
        (f"00-{'0' * 32}-{'b' * 16}-01", False),
        (f"00-{'a' * 32}-{'0' * 16}-01", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_traceparent(text: str, valid: bool) -> None:
    assert (context.parse_traceparent(text) is not None) == valid


def test_child_environment_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_TRACE", "message")
    before = dict(os.environ)
    with tracing.child_environment():
        assert os.environ["MINIVLLM_TRACE"] == "off"  # what holds here, whatever the variable says
        assert "TRACEPARENT" not in os.environ
    with recording(tmp_path, "lifecycle"), tracing.span("run") as run:
        with tracing.child_environment():
            assert os.environ["MINIVLLM_TRACE"] == "lifecycle"
            assert os.environ["MINIVLLM_TRACE_DIR"] == str(tmp_path / "trace")
            parent = context.parse_traceparent(os.environ["TRACEPARENT"])
            assert parent is not None and context.pack(*parent) == run.context
    assert dict(os.environ) == before


def test_a_callers_traceparent_is_the_parent_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{'a' * 32}-{'b' * 16}-01")
    with recording(tmp_path), tracing.span("run"), tracing.span("rpc.call"):
        pass
    store = store_of(tmp_path)
    assert store.trace_id == "a" * 32
    assert store.root is not None and store.root.parent_span_id == "b" * 16
    assert store.orphans() == []


# --- the step board


@pytest.fixture
def line() -> memoryview:
    memory = memoryview(bytearray(board.BOARD_BYTES))
    yield memory
    tracing.detach_board()


def test_board_shows_lifecycle_steps_with_tracing_off(line: memoryview) -> None:
    assert tracing.read_board(line) == []
    with tracing.span("worker.main"):
        tracing.attach_board(line)
        assert tracing.read_board(line) == ["worker.main"]
        with tracing.span("worker.init"), tracing.span("rpc.execute"):
            assert tracing.read_board(line) == ["worker.main", "worker.init"]
        with contextlib.suppress(ValueError), tracing.span("worker.load_model"):
            assert tracing.read_board(line)[-1] == "worker.load_model"
            raise ValueError("x")
        assert tracing.read_board(line) == ["worker.main"]
    assert tracing.read_board(line) == []


def test_board_shows_rpc_steps_while_tracing(line: memoryview, tmp_path: Path) -> None:
    with recording(tmp_path, "message"):
        tracing.attach_board(line)
        with tracing.span("worker.busy_loop"), tracing.span("rpc.execute"), tracing.span("mq.enqueue"):
            assert tracing.read_board(line) == ["worker.busy_loop", "rpc.execute"]
    with recording(tmp_path, "lifecycle"):
        with tracing.span("worker.busy_loop"), tracing.span("rpc.execute"):
            # tracing.active: the slower branch is taken anyway, but there is nothing to record.
            assert tracing.read_board(line)[0] == "worker.busy_loop"


def test_other_threads_do_not_disturb_the_board(line: memoryview) -> None:
    tracing.attach_board(line)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with tracing.span("worker.parent_died"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    with tracing.span("worker.busy_loop"):
        thread.start()
        assert inside.wait(10)
        assert tracing.read_board(line) == ["worker.busy_loop"]
        leave.set()
        thread.join()
        assert tracing.read_board(line) == ["worker.busy_loop"]


def test_board_survives_depth_and_garbage(line: memoryview) -> None:
    tracing.attach_board(line)
    spans = [tracing.span("worker.init") for _ in range(20)]
    for span in spans:
        span.__enter__()
    assert len(tracing.read_board(line)) == board.MAX_DEPTH
    for span in reversed(spans):
        span.__exit__(None, None, None)
    assert tracing.read_board(line) == []
    line[:] = b"\xff" * board.BOARD_BYTES
    assert tracing.read_board(line) == []
    with pytest.raises(ValueError, match="64 bytes"):
        tracing.attach_board(memoryview(bytearray(8)))


def test_board_memory_can_be_given_back() -> None:
    memory = bytearray(board.BOARD_BYTES)
    tracing.attach_board(memoryview(memory))
    tracing.detach_board()
    memory.append(0)  # refused while a view is left
