"""The span log: begin and end of spans as numbers in pages, one per thread and trace, joined with what the spool says."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minivllm import tracing
from minivllm.trace_store import TraceStore
from minivllm.tracing import span_log
from tests.tracing_helpers import LIMIT_S, environment, recording, run_script, store_of


def test_more_spans_than_a_unit_holds(tmp_path: Path) -> None:
    """Pages and units are turned without a gap, and what is nested across them finds its parent."""
    with recording(tmp_path, "message"), tracing.span("run"):
        for number in range(3000):
            with tracing.span("rpc.call", number=number), tracing.span("mq.enqueue"):
                pass
        tracing.write_ended()
        while_running = store_of(tmp_path)
    for store in (while_running, store_of(tmp_path)):
        calls = store.spans("rpc.call")
        assert [span.get("number") for span in calls] == list(range(3000))
        assert [span.parent_span_id for span in store.spans("mq.enqueue")] == [span.span_id for span in calls]
        assert len({span.span_id for span in store.spans()}) == 6001 and store.orphans() == []


def test_two_traces_in_turn_in_one_thread(tmp_path: Path) -> None:
    """A client with two engines: each span is in the trace of its parent, and a page of each trace is enough."""
    with recording(tmp_path):
        contexts = []
        for _ in range(2):
            run = tracing.start_span("run")
            contexts.append(run.context)
            run.end()
        for number in range(400):
            with tracing.span("rpc.call", parent=contexts[number % 2], number=number):
                pass
        (log,) = (tmp_path / "trace").glob("*.spans")
        pages = log.read_bytes().count(span_log.MAGIC)
    assert pages <= 2 * -(-200 // span_log.ENTRIES) + 1
    numbers: list[list[int]] = []
    for context in contexts:
        store = TraceStore.open(tmp_path / "trace", trace_id=context[:16].hex())
        numbers.append([span.get("number") for span in store.spans("rpc.call")])
    assert numbers == [list(range(0, 400, 2)), list(range(1, 400, 2))]


def test_who_a_span_belongs_to_is_known_by_its_page(tmp_path: Path) -> None:
    """A worker gets its label while it runs; what another thread does meanwhile is under the one or the other name."""
    with recording(tmp_path, "message", role="worker"), tracing.span("run"):
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with tracing.span("mq.dequeue", said=True):
                    time.sleep(0.0001)

        thread = threading.Thread(target=work, name="reader é")
        thread.start()
        for number in range(20):
            with tracing.span("rpc.execute", number=number):
                tracing.set_label(f"tp{number}")
        stop.set()
        thread.join()
    store = store_of(tmp_path)
    assert [span.get("number") for span in store.spans("rpc.execute")] == list(range(20))
    found = store.spans("mq.dequeue")
    assert all(span.get("said") for span in found)
    assert {span.attributes["thread.name"] for span in found} == {"reader é"}


def test_a_span_that_is_open_when_the_directory_changes(tmp_path: Path) -> None:
    """It is written where tracing goes to when it ends, with all that it says."""
    for number in (1, 2):
        tracing.configure("client", trace_dir=str(tmp_path / "a"), level="rpc")
        with tracing.span("rpc.call", number=number) as span:  # the second of its name is one of the hot path
            if number == 2:
                tracing.configure("client", trace_dir=str(tmp_path / "b"), level="rpc")
                span.set(said=True)
    tracing.shutdown()

    def calls(name: str) -> list[tuple[Any, ...]]:
        return [
            (s.get("number"), s.get("said"), s.unfinished)
            for s in TraceStore.open(tmp_path / name).spans("rpc.call")
        ]

    assert calls("a") == [(1, None, False)]
    assert calls("b") == [(2, True, False)]


@pytest.mark.parametrize("torn", ["page", "spool"])
def test_a_log_and_a_spool_that_do_not_match(tmp_path: Path, torn: str) -> None:
    """Of a page without its header, and of a spool that is not there, the rest is still read."""
    result = run_script(
        tmp_path,
        """
        import signal
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="rpc")
        with tracing.span("run"):
            for number in range(300):
                with tracing.span("rpc.call", number=number): pass
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert result.returncode == -9, result.stderr
    (log,) = (tmp_path / "trace").glob("*.spans")
    if torn == "spool":
        log.with_suffix(".spool").unlink()
    else:
        data = bytearray(log.read_bytes())
        at = data.index(span_log.MAGIC)
        data[at : at + len(span_log.MAGIC)] = bytes(len(span_log.MAGIC))
        log.write_bytes(data)
    spans = store_of(tmp_path).spans()
    assert [span.name for span in spans if span.unfinished] == ["run"]
    # The first of a name is not in the log.
    assert len(spans) == (2 if torn == "spool" else 1 + 300 - span_log.ENTRIES)


KILLED_AND_FOLLOWED = """
import signal
from minivllm import tracing
from minivllm.tracing.process import identity
identity.pid = 7  # every container has one
tracing.configure("client", trace_dir=DIR, level="rpc")
with tracing.span("run"):
    request = tracing.start_span("request", number=1)
    for number in range(3):
        with tracing.span("rpc.call", number=number):
            if LAST and number == 2: os.kill(os.getpid(), signal.SIGKILL)
tracing.shutdown()
"""


def test_the_files_of_a_killed_process_stay_when_another_one_has_its_name(tmp_path: Path) -> None:
    """Containers give the same pid again, or at the same time, and may share a directory."""
    killed = KILLED_AND_FOLLOWED.replace("LAST", "True")
    assert run_script(tmp_path, killed).returncode == -9

    def shown(number: int) -> list[tuple[Any, ...]]:
        store = TraceStore.open(tmp_path / "trace", number=number)
        assert len(store.processes()) == 1 and store.orphans() == []
        return [(s.name, s.get("number"), s.unfinished, s.start_ns, s.end_ns) for s in store.spans()]

    before = shown(1)
    assert [line[:3] for line in before] == [
        ("run", None, True),
        ("request", None, True),
        ("rpc.call", 0, False),
        ("rpc.call", None, False),  # it had ended since the process had waited
        ("rpc.call", None, True),
    ]
    for _ in range(2):
        assert run_script(tmp_path, KILLED_AND_FOLLOWED.replace("LAST", "False")).returncode == 0
    assert shown(1) == before
    assert [line[0] for line in shown(3)] == ["run", "request", "rpc.call", "rpc.call", "rpc.call"]


def test_a_run_that_goes_on_is_read_without_orphans(tmp_path: Path) -> None:
    """Whenever it is read, a span is there only if its parent is, in another process or its own."""
    script = tmp_path / "live.py"
    script.write_text(
        """
import os, sys, time
from minivllm import tracing
there, here = os.pipe()
limit = time.monotonic() + float(sys.argv[2])
if os.fork():
    tracing.configure("engine_core", trace_dir=sys.argv[1], level="message")
    with tracing.span("run"):
        while not os.path.exists("enough") and time.monotonic() < limit:
            with tracing.span("engine_core.step"), tracing.span("rpc.call") as call:
                os.write(here, call.context)
                time.sleep(0.0002)
    os.close(here)
    os.wait()
else:
    os.close(here)
    tracing.configure("worker", rank=0, trace_dir=sys.argv[1], level="message")
    while context := os.read(there, 25):
        with tracing.span("rpc.execute", parent=context), tracing.span("runner.execute_model"):
            pass
"""
    )
    process = subprocess.Popen(
        [sys.executable, str(script), "trace", str(LIMIT_S)], cwd=tmp_path, env=environment()
    )
    counts: list[int] = []
    try:
        # As often as it takes to have read it in the middle; how long that is, is up to the machine.
        while process.poll() is None and len(set(counts)) <= 5:
            time.sleep(0.05)
            # A directory in which nobody has written anything yet holds no trace.
            run_is_there = any(f.stat().st_size for f in tmp_path.glob("trace/engine_core-*.journal.jsonl"))
            if run_is_there and list(tmp_path.glob("trace/worker-*.spans")):
                store = TraceStore.open(tmp_path / "trace")
                assert store.orphans() == [] and store.damaged_lines == 0
                counts.append(len(store.spans("rpc.execute")))
    finally:
        (tmp_path / "enough").touch()
        process.wait(LIMIT_S)
    assert process.returncode == 0
    assert counts == sorted(counts) and len(set(counts)) > 5
    assert store_of(tmp_path).orphans() == []


def test_what_the_end_could_not_bring_into_json_is_no_damage(tmp_path: Path) -> None:
    """A process killed while it writes its OTLP/JSON leaves half a line there, and everything in the other files."""
    killed = KILLED_AND_FOLLOWED.replace("LAST", "True")
    assert run_script(tmp_path, killed).returncode == -9
    before = store_of(tmp_path)
    (spans,) = (path for path in (tmp_path / "trace").glob("*.jsonl") if "journal" not in path.name)
    spans.write_bytes(b'{"resourceSpans":[{"resource":{"attr')
    after = store_of(tmp_path)
    assert after.warnings == [] and after.damaged_lines == 0 and len(after.spans()) == len(before.spans())
