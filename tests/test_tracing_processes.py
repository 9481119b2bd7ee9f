"""Tracing over several processes: context, clocks, killed processes, forks, failpoints. Real processes only."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from minivllm.exceptions import ConfigError
from minivllm.trace_store import TraceStore
from minivllm.tracing import failpoints
from tests.tracing_helpers import run_script, store_of

# A client, an EngineCore and two workers, with the tracing calls that the real ones make.
TREE = """
import multiprocessing, signal, threading
from minivllm import tracing

def worker(rank, variables, work):
    tracing.configure("worker", rank=rank, label=f"tp{rank}", environment=variables)
    tracing.record_bootstrap("worker.bootstrap")
    with tracing.span("worker.main", rank=rank):
        with tracing.span("worker.load_model", attrs={"file.size": 3}):
            time.sleep(0.01)
        with tracing.span("worker.busy_loop"):
            for number in range(3):
                with tracing.span("rpc.execute", seq=number):
                    if work:
                        work(rank, number)

def engine(method, variables, work):
    tracing.configure("engine_core", environment=variables)
    context = multiprocessing.get_context(method)
    with tracing.span("engine_core.init"), tracing.span("executor.init"):
        lives, children = [], []
        for rank in range(2):
            with tracing.span("executor.make_worker_process", rank=rank) as make:
                life = tracing.start_span("worker.process", rank=rank)
                with tracing.child_environment():
                    child = context.Process(target=worker, args=(rank, tracing.child_variables(), work))
                    child.start()
                life.set({"process.pid": child.pid})
                lives.append(life)
                children.append(child)
        for child, life in zip(children, lives):
            child.join()
            code = child.exitcode
            life.set({"process.exit.code": code})
            life.end()

def main(method="spawn", work=None, level="rpc"):
    tracing.configure("client", trace_dir=DIR, level=level)
    run = tracing.start_span("run", model="tiny")
    with tracing.span("engine_core.spawn"):
        with tracing.child_environment(parent=run.context):
            child = multiprocessing.get_context(method).Process(
                target=engine, args=(method, tracing.child_variables(parent=run.context), work))
            child.start()
    child.join()
    run.end()
    tracing.shutdown()
"""


def run_tree(directory: Path, body: str, **variables: str) -> TraceStore:
    result = run_script(directory, TREE + body, **variables)
    assert result.returncode == 0, result.stderr
    return store_of(directory)


# --- one trace


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_one_trace_over_all_processes(tmp_path: Path, method: str) -> None:
    store = run_tree(tmp_path, f'if __name__ == "__main__":\n    main("{method}")\n')
    assert store.trace_ids == [store.trace_id]
    assert store.orphans() == []
    assert [depth for depth, _ in store.tree()].count(0) == 1
    assert store.root is not None and store.root.name == "run"
    services = [process.service for process in store.processes()]
    assert services == [
        "minivllm.client",
        "minivllm.engine_core",
        "minivllm.worker.tp0",
        "minivllm.worker.tp1",
    ]
    for rank in range(2):
        names = [span.name for span in store.spans(process="worker", rank=rank)]
        assert sorted(set(names)) == [
            "rpc.execute", "worker.bootstrap", "worker.busy_loop", "worker.load_model", "worker.main",
        ]  # fmt: skip
        assert names.count("rpc.execute") == 3
        (bootstrap,) = store.spans("worker.bootstrap", rank=rank)
        (main,) = store.spans("worker.main", rank=rank)
        (make,) = store.spans("executor.make_worker_process", rank=rank)
        assert make.start_ns <= bootstrap.start_ns <= make.end_ns
        assert bootstrap.end_ns <= main.start_ns
        assert store.parent(bootstrap) is store.parent(main) is make
        (life,) = store.spans("worker.process", rank=rank)
        assert life.start_ns <= main.start_ns and main.end_ns <= life.end_ns  # one clock for all processes
    ids = [span.span_id for span in store.spans()]
    assert len(ids) == len(set(ids))


def test_off_leaves_children_off(tmp_path: Path) -> None:
    result = run_script(
        tmp_path, TREE + 'if __name__ == "__main__":\n    main(level="off")\n', MINIVLLM_TRACE="rpc"
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "trace").exists()


def test_fork_does_not_write_the_parents_spans_twice(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="rpc")
        with tracing.span("run"), tracing.span("rpc.call", where="parent"):
            with tracing.span("future.result"):
                pass
            variables = tracing.child_variables()
            pid = os.fork()
            if pid == 0:
                tracing.configure("worker", rank=0, environment=variables)
                with tracing.span("worker.main"):
                    with tracing.span("rpc.execute"):
                        pass
                tracing.shutdown()
        if pid:
            os.waitpid(pid, 0)
            tracing.shutdown()
        """,
    )
    assert result.returncode == 0, result.stderr
    store = store_of(tmp_path)
    assert sorted(span.name for span in store.spans()) == [
        "future.result", "rpc.call", "rpc.execute", "run", "worker.main",
    ]  # fmt: skip
    (main,) = store.spans("worker.main")
    assert store.parent(main) is store.spans("rpc.call")[0]
    assert store.orphans() == []


def test_a_process_is_known_by_its_last_label(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("worker", rank=3, trace_dir=DIR, level="rpc")
        with tracing.span("worker.main"):
            with tracing.span("worker.init_device"):
                pass
            tracing.set_label("pp1.tp1")
        """,
    )
    assert result.returncode == 0, result.stderr
    (process,) = store_of(tmp_path).processes()
    assert (process.service, process.label) == ("minivllm.worker.pp1.tp1", "worker.pp1.tp1")
    assert (process.role, process.rank) == ("worker", 3)


# --- killed processes


def test_sigkill_from_outside_shows_what_was_open(tmp_path: Path) -> None:
    store = run_tree(
        tmp_path,
        """
def work(rank, number):
    if rank == 1 and number == 1:
        with tracing.span("runner.execute_model", tokens=5), tracing.span("model.forward"):
            tracing.flush()
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(work=work)
""",
    )
    dead = store.spans(process="worker", rank=1)
    unfinished = [span.name for span in dead if span.unfinished]
    assert unfinished == [
        "worker.main",
        "worker.busy_loop",
        "rpc.execute",
        "runner.execute_model",
        "model.forward",
    ]
    (life,) = store.spans("worker.process", rank=1)
    for span in dead:
        if span.unfinished:
            assert span.is_error and "SIGKILL" in span.status_message and "worker.tp1" in span.status_message
            assert span.end_ns == life.end_ns
    assert [span.get("seq") for span in store.spans("rpc.execute", rank=1)] == [0, None]
    assert store.orphans() == []
    assert not any(span.unfinished for span in store.spans(process="worker", rank=0))
    failure = store.first_failure()
    assert failure is not None and failure.name == "model.forward" and failure.process.rank == 1


def test_spans_that_ended_just_before_a_sigkill_are_not_lost(tmp_path: Path) -> None:
    store = run_tree(
        tmp_path,
        """
def work(rank, number):
    with tracing.span("runner.execute_model"):
        pass
    if rank == 1 and number == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # well within the interval of the drain thread

if __name__ == "__main__":
    main(work=work)
""",
    )
    ended = store.spans("runner.execute_model", rank=1)
    assert len(ended) == 3
    assert not any(span.unfinished for span in ended)
    assert store.orphans() == []
    (load,) = store.spans("worker.load_model", rank=1)
    assert load.attributes["file.size"] == 3  # the journal has the attributes of lifecycle steps


def test_whole_tree_killed(tmp_path: Path) -> None:
    store = run_tree(
        tmp_path,
        """
def work(rank, number):
    if number == 2:
        time.sleep(0.5 if rank else 30)
        os.killpg(0, signal.SIGKILL)

if __name__ == "__main__":
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        main(work=work)
    os.waitpid(pid, 0)
    time.sleep(0.2)
""",
    )
    open_steps = {(span.process.label, span.name) for span in store.spans() if span.unfinished}
    assert open_steps == {
        ("client", "run"),
        ("engine_core", "engine_core.init"),
        ("engine_core", "executor.init"),
        ("engine_core", "worker.process"),
        *((f"worker.tp{rank}", name) for rank in range(2) for name in ("worker.main", "worker.busy_loop", "rpc.execute")),
    }  # fmt: skip
    assert store.orphans() == []
    assert all(span.end_ns >= span.start_ns for span in store.spans())


def test_living_process_is_open_and_not_unfinished(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        from minivllm.trace_store import TraceStore
        tracing.configure("client", trace_dir=DIR, level="rpc")
        with tracing.span("run"), tracing.span("rpc.call"):
            store = TraceStore.open(DIR)
            assert store.processes()[0].alive
            assert [(s.name, s.unfinished, s.is_error, s.get("open")) for s in store.spans()] == [
                ("run", False, False, True), ("rpc.call", False, False, True)], store.spans()
        tracing.shutdown()
        assert not TraceStore.open(DIR).processes()[0].alive
        """,
    )
    assert result.returncode == 0, result.stderr


def test_torn_last_line(tmp_path: Path) -> None:
    run_tree(tmp_path, 'if __name__ == "__main__":\n    main()\n')
    files = sorted((tmp_path / "trace").glob("worker-*[0-9].jsonl"))
    files[0].write_bytes(files[0].read_bytes()[:-40])
    journal = next((tmp_path / "trace").glob("client-*.journal.jsonl"))
    journal.write_bytes(journal.read_bytes() + b'{"span":{"traceId":"ab')
    store = store_of(tmp_path)
    assert store.damaged_lines == 2
    assert store.root is not None
    assert len(store.spans("rpc.execute")) < 6


# --- failpoints


def test_failpoint_kill(tmp_path: Path) -> None:
    store = run_tree(
        tmp_path,
        'if __name__ == "__main__":\n    main()\n',
        MINIVLLM_FAILPOINTS="rpc.execute@rank1#2=kill; worker.load_model@rank7=kill",
    )
    spans = store.spans("rpc.execute", rank=1)
    assert [(span.get("seq"), span.unfinished) for span in spans] == [(0, False), (1, True)]
    assert spans[1].events[0].attributes["minivllm.action"] == "rpc.execute@rank1#2=kill"
    assert store.first_failure() is spans[1]
    (life,) = store.spans("worker.process", rank=1)
    assert life.attributes["process.exit.code"] == -signal.SIGKILL
    assert len(store.spans("rpc.execute", rank=0)) == 3


def test_failpoints_of_each_kind(tmp_path: Path) -> None:
    store = run_tree(
        tmp_path,
        'if __name__ == "__main__":\n    main()\n',
        MINIVLLM_FAILPOINTS=(
            "worker.load_model@rank0=sleep:0.25; rpc.execute@rank0#2=raise; worker.bootstrap@rank1=exit:7;"
        ),
    )
    (load,) = store.spans("worker.load_model", rank=0)
    assert load.duration_ns > 250e6 and not load.is_error
    first, second = store.spans("rpc.execute", rank=0)
    assert not first.is_error
    assert "failpoint rpc.execute@rank0#2=raise" in second.status_message
    assert second.attributes["error.type"] == "minivllm.tracing.failpoints.FailpointError"
    (bootstrap,) = store.spans(process="worker", rank=1)
    assert bootstrap.name == "worker.bootstrap" and "exited with code 7" in bootstrap.status_message
    assert [life.attributes["process.exit.code"] for life in store.spans("worker.process")] == [1, 7]


@pytest.mark.parametrize(
    ("failpoint", "where"),
    [
        ("run@client=kill", "client"),
        ("engine_core.init@engine=kill", "engine_core"),
        ("worker.process=kill", "engine_core"),
        ("worker.main@rank0=kill", "worker.tp0"),
    ],
)
def test_failpoints_by_process(tmp_path: Path, failpoint: str, where: str) -> None:
    result = run_script(
        tmp_path, TREE + 'if __name__ == "__main__":\n    main()\n', MINIVLLM_FAILPOINTS=failpoint
    )
    assert (result.returncode == -signal.SIGKILL) == (where == "client")
    failure = store_of(tmp_path).first_failure()
    assert failure is not None
    assert (failure.name, failure.process.label) == (failpoint.split("@")[0].split("=")[0], where)


def test_failpoints_work_without_tracing(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("worker", rank=0)
        assert tracing.active and tracing.level == tracing.OFF
        for number in range(3):
            with tracing.span("rpc.execute"):
                with tracing.span("mq.dequeue"):
                    print("executed", number)
        """,
        MINIVLLM_FAILPOINTS="mq.dequeue@rank0#3=raise",
    )
    assert result.returncode == 1
    assert result.stdout.split() == ["executed", "0", "executed", "1"]
    assert "FailpointError: failpoint mq.dequeue@rank0#3=raise" in result.stderr


def test_one_process_stands_in_for_the_others(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("client")
        for name in ("engine_core.init", "worker.load_model", "run"):
            try:
                with tracing.span(name):
                    print("ran", name)
            except tracing.FailpointError as error:
                print("failed", error)
        """,
        MINIVLLM_FAILPOINTS="engine_core.init@engine=raise; worker.load_model@rank0=raise; run@rank0=raise",
    )
    assert result.stdout.splitlines() == [
        "failed failpoint engine_core.init@engine=raise",
        "failed failpoint worker.load_model@rank0=raise",
        "ran run",
    ]


def test_hang_can_be_killed(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run_script(
        tmp_path,
        """
        import signal, threading
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="lifecycle")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with tracing.span("run"):
            pass
        """,
        MINIVLLM_FAILPOINTS="run=hang",
    )
    assert result.returncode == -signal.SIGTERM
    assert time.monotonic() - begin < 20
    (span,) = store_of(tmp_path).spans()
    assert span.unfinished


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("worker.load_model", "is not of the form"),
        ("worker.load_model=explode", "is not of the form"),
        ("worker.load_model@worker1=kill", "is not of the form"),
        ("worker.load_model=sleep", "is not of the form"),
        ("worker.load_model#0=kill", "count from 1"),
        ("worker.load_modle=kill", "is not a span"),
    ],
)
def test_bad_failpoint_is_one_clear_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        failpoints.parse(f"run=kill; {text}")
    assert "\n" not in str(error.value) and "MINIVLLM_FAILPOINTS" in str(error.value)


def test_failpoint_syntax() -> None:
    parsed = failpoints.parse(
        " run @ client = exit : 3 ;; rpc.execute#*=sleep:0.5;rpc.execute@rank12#4=raise; "
    )
    (run,) = parsed["run"]
    assert (run.who, run.nth, run.action, run.argument) == ("client", 1, "exit", 3.0)
    every, fourth = parsed["rpc.execute"]
    assert (every.who, every.nth, every.argument) == ("", 0, 0.5)
    assert (fourth.who, fourth.nth, fourth.action) == ("rank12", 4, "raise")


# --- cost


def test_idle_process_uses_no_cpu(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("client", trace_dir=DIR, level="message")
        with tracing.span("run"), tracing.span("rpc.call"):
            pass
        time.sleep(1)
        before = time.process_time()
        time.sleep(2)
        print(time.process_time() - before)
        """,
    )
    assert float(result.stdout) < 0.002


def test_import_is_light(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        """
        from minivllm import tracing
        tracing.configure("worker", rank=0, trace_dir=DIR, level="message")
        with tracing.span("worker.main"):
            pass
        tracing.shutdown()
        print([name for name in ("torch", "numpy", "opentelemetry", "rich", "minivllm.trace_store")
               if name in sys.modules])
        """,
    )
    assert result.stdout.strip() == "[]", result.stderr


TWO_ENGINES = """
from minivllm import LLM, SamplingParams

def generate(llm, count):
    for _ in range(count):
        llm.generate(["A"], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)

if __name__ == "__main__":
    first = LLM(device="cpu", trace=DIR)
    second = LLM(device="cpu", trace=DIR + SECOND)
    generate(first, 1), generate(second, 1)
    first.shutdown()
    generate(second, 2)
    second.shutdown()
"""


def test_the_end_of_an_engine_leaves_another_ones_recording_alone(tmp_path: Path) -> None:
    result = run_script(tmp_path, TWO_ENGINES.replace("SECOND", "''"))
    assert result.returncode == 0 and "is still there" not in result.stderr, result.stderr
    for number, requests in ((1, 1), (2, 3)):
        store = TraceStore.open(tmp_path / "trace", number=number)
        assert len(store.spans("request")) == requests
        assert not [span for span in store.spans() if span.unfinished or span.is_error]
        assert store.orphans() == []


def test_two_engines_traced_in_two_directories_are_told_what_that_means(tmp_path: Path) -> None:
    result = run_script(tmp_path, TWO_ENGINES.replace("SECOND", "'2'"))
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "is still there" in line]
    assert f"the engine that is traced in {tmp_path / 'trace'} is still there" in line
