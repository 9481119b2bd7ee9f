"""The spool: what a process records is there whatever happens to it, and becomes OTLP/JSON."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from minivllm import tracing
from minivllm.trace_store import TraceStore
from minivllm.tracing import files, spool
from minivllm.tracing.mapped import UNIT_BYTES
from minivllm.tracing.spool_reader import SpoolReader, read_process
from tests.tracing_helpers import recording, run_script, store_of


def names(lines: list[bytes]) -> list[str]:
    return [
        span["name"]
        for line in lines
        for group in json.loads(line)["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]


def shown(store: TraceStore) -> list[tuple[Any, ...]]:
    return [
        (s.name, s.span_id, s.parent_span_id, s.kind, s.start_ns, s.end_ns, s.attributes, s.links, s.status_message)
        for s in store.spans()
    ]  # fmt: skip


def test_the_spool_says_the_same_as_the_file_made_of_it(tmp_path: Path) -> None:
    with recording(tmp_path, "message"):
        with tracing.span("run", model="tiny") as run:
            for number in range(300):
                with tracing.span(
                    "mq.dequeue", links=(run.context,), n=number, x=0.5, s="é", no=None, l=[1, "a"]
                ):
                    pass
            with (
                tracing.span("mq.dequeue", big=1 << 70, bad="\ud800"),
                tracing.span("mq.enqueue", kind="client"),
            ):
                pass
            with pytest.raises(ValueError, match="y"), tracing.span("rpc.call", attrs={"rpc.method": "echo"}):
                raise ValueError("y")
        from_spool = shown(store_of(tmp_path))
    directory = tmp_path / "trace"
    assert not [*directory.glob("*.spool"), *directory.glob("*.spans")], "all of it is in the .jsonl"
    assert shown(store_of(tmp_path)) == from_spool
    assert len(from_spool) == 304


def test_spans_are_whole_after_a_sigkill(tmp_path: Path) -> None:
    """Not only that they ended: their attributes, too, and those of each thread."""
    result = run_script(
        tmp_path,
        """
        import signal, threading
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="message")
        def work(number):
            for index in range(3000):
                with tracing.span("rpc.call", number=number, index=index), tracing.span("mq.enqueue"):
                    pass
        with tracing.span("run"), tracing.span("engine_core.step"):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert result.returncode == -9
    store = store_of(tmp_path)
    assert {(span.get("number"), span.get("index")) for span in store.spans("rpc.call")} == {
        (number, index) for number in range(3) for index in range(3000)
    }
    assert len(store.spans("mq.enqueue")) == 9000
    assert [span.name for span in store.spans() if span.unfinished] == ["run", "engine_core.step"]
    assert store.damaged_lines == 0 and store.orphans() == []


def lines_of(target: spool.Spool) -> tuple[list[bytes], int]:
    found = read_process(target.path, target.path.with_suffix(".spans"))
    return found.lines, found.torn


def text(**fields: str) -> bytes:
    return spool._encode(spool.Text(json.dumps(fields)))


def test_a_torn_record_costs_itself_only(tmp_path: Path) -> None:
    target = spool.Spool(tmp_path / "a.spool")
    target.resource('{"attributes":[]}', 0)
    for number in range(3):
        target.append(text(name=f"n{number}"))
    lines, torn = lines_of(target)
    assert (names(lines), torn) == (["n0", "n1", "n2"], 0)
    data = bytearray(target.path.read_bytes())
    data[data.index(b"n2")] = 0
    target.path.write_bytes(data)
    lines, torn = lines_of(target)
    assert (names(lines), torn) == (["n0", "n1"], 1)
    target.close()


def test_units_and_large_records(tmp_path: Path) -> None:
    """Threads fill units together; a record larger than a unit gets a larger one; growing is read as it goes."""
    target, reader = spool.Spool(tmp_path / "a.spool"), SpoolReader()
    target.resource('{"attributes":[]}', 0)
    large = "x" * (2 * UNIT_BYTES)

    def new_names() -> list[str]:
        with target.whole() as data:
            return names(list(reader.lines(data, [])))

    def work(thread: int) -> None:
        for number in range(400):
            target.append(text(name=f"{thread}.{number}", fill="x" * 2000))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    found = new_names()
    for thread in threads:
        thread.join()
    target.append(text(name="large", fill=large))
    target.append(text(name="last"))
    found += new_names()
    assert sorted(found) == sorted([*(f"{t}.{n}" for t in range(4) for n in range(400)), "large", "last"])
    assert found[-2:] == ["large", "last"]
    assert names(lines_of(target)[0]) == found
    target.close()


def test_a_full_disk_costs_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with recording(tmp_path), tracing.span("run"):
        monkeypatch.setattr(os, "posix_fallocate", full)
        for number in range(4000):
            with tracing.span("rpc.call", number=number, text="x" * 100):
                pass
    assert [record.message for record in caplog.records if "incomplete" in record.message] != []
    assert len([record for record in caplog.records if "incomplete" in record.message]) == 1
    assert 500 < len(store_of(tmp_path).spans("rpc.call")) < 4000


def test_an_end_that_would_take_too_long_leaves_the_rest_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CLOSE_LIMIT_S", 0.0)
    for run in range(2):  # the second must not touch what the first has left
        with recording(tmp_path), tracing.span("run", number=run):
            for number in range(500):
                with tracing.span("rpc.call", number=number):
                    pass
        store = store_of(tmp_path)
        assert store.root is not None and store.root.get("number") == run
        assert [span.get("number") for span in store.spans("rpc.call")] == list(range(500))
        assert len(store.trace_ids) == run + 1
    assert list((tmp_path / "trace").glob("*.spool"))
