"""What a trace still says of a process that was killed at any moment, interrupted, or forked: real processes, real signals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minivllm.trace_store import TraceStore
from tests.tracing_helpers import run_script, store_of

KILLED = """
import json, random, signal, threading
from minivllm import tracing
from minivllm.distributed.shm_broadcast import MessageQueue
from minivllm.tracing.process import clock

HERE = os.path.dirname(DIR)
# One that is loaded already is killed again and again.
def work(number):
    diary = os.open(f"{HERE}/diary{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def note(*words):
        os.write(diary, json.dumps(words).encode() + b"\\n")
    def step(name, wait=None, **attributes):
        with tracing.span(name, **attributes) as span:
            note("begun", f"{span.span_id:016x}", name, span.start_ns + clock.offset_ns)
            if wait is not None:
                for inner in range(random.choice((0, 1, 3, 12))):
                    step("runner.execute_model", number=inner, said=True)
        note("ended", f"{span.span_id:016x}", span.end_ns + clock.offset_ns)
    def write_in_thread():
        while True:
            for _ in range(5):
                step("dist.all_reduce", said=True)
            time.sleep(0.0005)
    tracing.configure("worker", rank=number, trace_dir=f"{DIR}{number}", level="message")
    queue = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue.wait_until_ready()
    with tracing.span("worker.main", rank=number):
        threading.Thread(target=write_in_thread, daemon=True).start()
        while True:
            step("rpc.execute", wait=True, said=True)
            note("waits")
            try:
                reader.dequeue(timeout=0.0002)
            except TimeoutError:
                pass
            note("waited")

for number in range(10):
    pid = os.fork()
    if pid == 0:
        work(number)
    while not os.path.exists(f"{HERE}/diary{number}") or os.path.getsize(f"{HERE}/diary{number}") < 2000:
        time.sleep(0.001)
    time.sleep(random.random() * 0.04)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_a_kill_at_any_moment_costs_at_most_a_few_attributes(tmp_path: Path) -> None:
    """What the process has said it did is there, once, with its times; attributes only of what ended since it waited."""
    result = run_script(tmp_path, KILLED, limit_s=20)
    assert result.returncode == 0, result.stderr
    lost = placed = 0
    for number in range(10):
        # A kill may have cut the last line short.
        whole, _, _ = (tmp_path / f"diary{number}").read_text().rpartition("\n")
        diary = [json.loads(line) for line in whole.splitlines()]
        begun = {words[1]: words[2:] for words in diary if words[0] == "begun"}
        ended = {words[1]: words[2] for words in diary if words[0] == "ended"}
        last_wait = max((i for i, words in enumerate(diary) if words[0] == "waited"), default=0)
        begin_of_wait = max(
            (i for i, words in enumerate(diary[:last_wait]) if words[0] == "waits"), default=0
        )
        before_wait = {words[1] for words in diary[:begin_of_wait] if words[0] == "ended"}
        store = TraceStore.open(tmp_path / f"trace{number}")
        spans = {span.span_id: span for span in store.spans()}
        assert len(spans) == len(store.spans())
        assert begun.keys() - spans.keys() == set()
        for span_id, (name, start_ns) in begun.items():
            span = spans[span_id]
            assert (span.name, span.start_ns) == (name, start_ns)
            if span_id in ended:
                assert span.end_ns == ended[span_id] and not span.unfinished and not span.is_error
                if span.get("said") is None:
                    assert span.recovered and span_id not in before_wait
                    lost += 1
            if span.recovered and "code.line.number" in span.attributes:
                placed += 1
                assert span.attributes["thread.name"] and span.attributes["code.file.path"] == "script.py"
        assert store.orphans() == []
        assert len([span for span in store.spans() if span.unfinished]) <= 8
    assert placed, "only the first of a name and steps of the lifecycle are not in the span log"
    assert lost < 10 * 64


def test_whoever_waits_has_written_everything(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        import signal
        from minivllm import tracing
        from minivllm.distributed.shm_broadcast import MessageQueue
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            tracing.configure("worker", rank=0, trace_dir=DIR, level="rpc")
            queue = MessageQueue(1, 1)
            reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
            with tracing.span("worker.main"):
                for number in range(20):
                    with tracing.span("rpc.execute", number=number):
                        pass
                os.write(tell, b".")
                reader.dequeue(indefinite=True)
        os.read(ready, 1)
        # It has polled, and sleeps.
        while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)
        os.killpg(0, signal.SIGKILL)
        """.replace(
            "from minivllm import tracing", "os.setpgid(0, 0)\n        from minivllm import tracing", 1
        ),
    )
    assert result.returncode == -9, result.stderr
    assert [span.get("number") for span in store_of(tmp_path).spans("rpc.execute")] == list(range(20))


def test_more_open_spans_than_the_table_has_room_for(tmp_path: Path) -> None:
    """Those that find no slot are noted in the journal."""
    result = run_script(
        tmp_path,
        """
        import signal
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="rpc")
        spans = [tracing.start_span("request", number=number) for number in range(5000)]
        for span in spans[::2]:
            span.end()
        spans += [tracing.start_span("request", number=number) for number in range(5000, 7000)]
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert result.returncode == -9, result.stderr
    spans = store_of(tmp_path).spans("request")
    assert len(spans) == 7000 == len({span.span_id for span in spans})
    assert len([span for span in spans if span.unfinished]) == 4500


def test_a_signal_handler_in_the_middle_of_it(tmp_path: Path) -> None:
    """It records, writes, and sometimes raises: nothing is lost and nothing is there twice."""
    result = run_script(
        tmp_path,
        """
        import itertools, signal
        from minivllm import tracing
        from minivllm.tracing.ended import write_ended
        tracing.configure("client", trace_dir=DIR, level="message")
        class Interrupted(Exception): pass
        counter, armed, depth, over = itertools.count(), False, 0, False
        def again():
            # Not periodically: on a busy machine a handler can take longer than the period, and they would pile up without end.
            if not over and depth < 5: signal.setitimer(signal.ITIMER_REAL, 0.0003)
        def interrupt(*_):
            global depth
            depth += 1
            again()  # the next signal may come meanwhile
            count = next(counter)
            with tracing.span("mq.enqueue", number=count):
                pass
            if count % 3 == 0: write_ended()
            if count % 7 == 0: tracing.flush()
            depth -= 1
            again()
            if count % 5 == 0 and armed and not depth: raise Interrupted
        signal.signal(signal.SIGALRM, interrupt)
        done = 0
        with tracing.span("run"):
            again()
            end = time.time() + 0.8
            while time.time() < end:
                with tracing.span("rpc.call", number=done):
                    done += 1
                try:
                    armed = True
                    write_ended()
                    armed = False
                except Interrupted:
                    armed = False
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
        tracing.shutdown()
        print(done, next(counter))
        """,
    )
    assert result.returncode == 0, result.stderr
    done, interrupts = map(int, result.stdout.split())
    store = store_of(tmp_path)
    assert interrupts > 50 and store.damaged_lines == 0
    for name, count in (("rpc.call", done), ("mq.enqueue", interrupts)):
        assert sorted(span.get("number") for span in store.spans(name)) == list(range(count))


def test_a_flush_in_the_middle_of_a_flush_leaves_the_log_to_it(tmp_path: Path) -> None:
    """A signal handler that comes while the outer one reads pages of which nothing is left to say."""
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        from minivllm.tracing.span_log import ENTRIES
        tracing.configure("client", trace_dir=DIR, level="message")
        def record(start):
            for number in range(start, start + 3 * ENTRIES):
                with tracing.span("rpc.call", number=number):
                    pass
        record(0)
        tracing.flush()
        flushes = 0
        class Forgotten(dict):
            def get(self, *args):
                global flushes
                if flushes < 3:
                    flushes += 1
                    tracing.flush()
                return super().get(*args)
        reader = tracing._recorder.files._log_reader
        reader._forgotten = Forgotten(reader._forgotten)
        record(3 * ENTRIES)
        tracing.flush()
        tracing.shutdown()
        print(6 * ENTRIES, flushes)
        """,
    )
    assert result.returncode == 0, result.stderr
    count, flushes = map(int, result.stdout.split())
    assert flushes == 3
    store = store_of(tmp_path)
    assert sorted(span.get("number") for span in store.spans("rpc.call")) == list(range(count))


def test_a_forked_child_leaves_the_parents_spans_alone(tmp_path: Path) -> None:
    """Also those that have ended and are not written yet, and those that it leaves on its way out."""
    result = run_script(
        tmp_path,
        """
        import signal
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="rpc")
        with tracing.span("run"), tracing.span("engine_core.step", number=-1):
            for number in range(5):
                with tracing.span("rpc.call", number=number): pass
            pid = 0
            with tracing.span("executor.execute_model"):
                pid = os.fork()
            if pid == 0:
                tracing.configure("worker", rank=0, trace_dir=DIR, level="rpc")
                with tracing.span("rpc.execute", number=7): pass
                tracing.shutdown()
                os._exit(0)
            os.waitpid(pid, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert result.returncode == -9, result.stderr
    store = store_of(tmp_path)

    def found(role: str) -> list[tuple[Any, ...]]:
        return sorted((span.name, span.unfinished) for span in store.spans(process=role))

    assert found("worker") == [("rpc.execute", False)]
    assert found("client") == sorted(
        [("run", True), ("engine_core.step", True), ("executor.execute_model", False)]
        + [("rpc.call", False)] * 5
    )
