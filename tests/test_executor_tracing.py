"""What a traced run of the executor shows: every step of its catalogue rows, in the right process, under the right parent."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from executor_helpers import make_executor
from scenario import raises, scenario, wait_until

from minivllm import tracing
from minivllm.exceptions import ExecutorFailedError, RemoteError
from minivllm.trace_store import Span, TraceStore

EXECUTOR_STEPS = [
    "executor.init",
    "executor.parallel_sizes",
    "executor.set_worker_envs",
    "executor.distributed_init_method",
    "executor.create_broadcast_mq",
    "executor.spawn_workers",
    "executor.make_worker_process",
    "executor.wait_for_ready",
    "executor.connect_response_mq",
    "executor.start_worker_monitor",
    "executor.collect_response_mqs",
    "executor.mq_handshake",
    "executor.post_init",
]
WORKER_STEPS = [
    "worker.bootstrap",
    "worker.main",
    "worker.install_signal_handlers",
    "worker.monitor_death_pipe",
    "worker.init",
    "worker.init_worker",
    "worker.set_process_title",
    "worker.init_device",
    "worker.load_model",
    "worker.init_message_queues",
    "worker.start_async_output_thread",
    "worker.enable_envs_cache",
    "worker.send_ready",
    "worker.mq_handshake",
    "worker.busy_loop",
    "worker.parent_died",
    "worker.shutdown",
]


def is_below(store: TraceStore, span: Span, ancestor: str) -> bool:
    parent = store.parent(span)
    while parent is not None and parent.name != ancestor:
        parent = store.parent(parent)
    return parent is not None


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@scenario()
def test_H1_L41_every_step_of_every_process(method: str) -> None:
    """Obligation 20: spans carry their own process, none is lost at the end, none is written twice; one trace."""
    os.environ["MINIVLLM_WORKER_MULTIPROC_METHOD"] = method
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("engine_core", trace_dir=directory, level="rpc")
        with tracing.span("engine_core.init"):
            executor = make_executor(async_scheduling=True)
        pids = {worker.rank: worker.pid for worker in executor.workers}
        with tracing.span("engine_core.step"):
            executor.collective_rpc("echo", args=(1,))
            executor.collective_rpc("echo", args=(1,), non_block=True, unique_reply_rank=1).result()
            executor.execute_model(None)  # type: ignore[arg-type]
            executor.sample_tokens(None)
            executor.execute_dummy_batch()
            executor.take_draft_token_ids()
            executor.check_health()
        with raises(RemoteError):
            executor.collective_rpc("fail_on", args=(0,))
        executor.shutdown()
        tracing.shutdown()
        store = TraceStore.open(directory)
    assert len(store.trace_ids) == 1 and not store.orphans()
    ids = [span.span_id for span in store.spans()]
    assert len(ids) == len(set(ids))
    mine = [span.name for span in store.spans() if span.process.pid == os.getpid()]
    rest = iter(mine)
    assert all(step in rest for step in EXECUTOR_STEPS[:6]), mine
    for step in (
        *EXECUTOR_STEPS,
        "executor.shutdown",
        "executor.close_death_writers",
        "executor.terminate_graceful",
    ):
        assert mine.count(step) == (
            2 if step in ("executor.make_worker_process", "executor.connect_response_mq") else 1
        )
    for name in (
        "execute_model",
        "sample_tokens",
        "execute_dummy_batch",
        "take_draft_token_ids",
        "check_health",
    ):
        (call,) = store.spans(name=f"executor.{name}")
        assert [child.name for child in store.children(call)] == ["rpc.call"]
    for rank, pid in pids.items():
        spans = [span for span in store.spans() if span.process.pid == pid]
        assert {span.process.rank for span in spans} == {rank}
        # A10: the order of the start-up, too. (The death pipe fires in a thread of its own.)
        rest = iter(span.name for span in spans)
        assert all(step in rest for step in WORKER_STEPS[:-2]), [span.name for span in spans]
        # L42: one step, one span.
        assert [span.name for span in spans].count("worker.init") == 1
        names = {span.name for span in spans}
        expected = set(WORKER_STEPS) | ({"worker.close_inherited_fds"} if method == "fork" else set())
        assert expected <= names, expected - names
        assert all(is_below(store, span, "worker.process") for span in spans if span.name == "worker.main")
        executes = [span for span in spans if span.name == "rpc.execute"]
        assert len(executes) == 8
        for span in executes:
            parent = store.parent(span)
            assert parent is not None and parent.name == "rpc.call" and parent.process.pid == os.getpid()
            assert span.get("seq") == parent.get("seq") and span.kind == "server"
            assert span.get("rpc.method") == parent.get("rpc.method")
        sent = [span for span in spans if span.name == "rpc.enqueue_output"]
        assert len(sent) == (7 if rank == 0 else 4)
        assert all(is_below(store, span, "rpc.call") for span in sent)
        failures = [span for span in spans if span.name == "worker.exception"]
        assert len(failures) == (1 if rank == 0 else 0)
        assert all(
            "KeyError" in span.status_message and is_below(store, span, "rpc.call") for span in failures
        )
    assert not [span for span in store.spans() if span.unfinished]


@scenario()
def test_trace_of_a_death() -> None:
    """The killed worker's open steps are shown unfinished, and the monitor says who died and where."""
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("engine_core", trace_dir=directory, level="rpc")
        with tracing.span("engine_core.init"):
            executor = make_executor()
        pid = executor.workers[1].pid
        told = threading.Event()
        executor.register_failure_callback(told.set)
        with raises(ExecutorFailedError, "while executing die"):
            executor.collective_rpc("die", args=(1,))
        assert told.wait(1)
        executor.shutdown()
        tracing.shutdown()
        store = TraceStore.open(directory)
    (death,) = store.spans(name="monitor.worker_died")
    assert death.is_error and death.get("rank") == 1 and death.get("pid") == pid
    assert len(store.spans(name="executor.failure_callback")) == 1
    unfinished = {span.name for span in store.spans() if span.unfinished}
    assert unfinished == {"worker.main", "worker.busy_loop", "rpc.execute"}
    (life,) = [span for span in store.spans(name="worker.process") if span.get("rank") == 1]
    assert life.is_error and life.attributes["process.exit.code"] == -signal.SIGKILL


@scenario()
def test_sigterm_and_sigkill_levels_are_shown() -> None:
    os.environ["MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S"] = os.environ["MINIVLLM_WORKER_SIGTERM_TIMEOUT_S"] = "0.2"
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("engine_core", trace_dir=directory, level="lifecycle")
        executor = make_executor()
        executor.collective_rpc("hold_gil", args=(1,), non_block=True)
        executor.shutdown()
        tracing.shutdown()
        store = TraceStore.open(directory)
    (graceful,) = store.spans(name="executor.terminate_graceful")
    assert graceful.get("left") == [1]
    for level in ("sigterm", "sigkill"):
        (span,) = store.spans(name=f"executor.terminate_{level}")
        assert span.get("ranks") == [1]


@scenario()
def test_failpoints_break_calls_where_they_say() -> None:
    """rpc.execute@rank1#3=raise: the third call fails on rank 1, with tracing off."""
    os.environ["MINIVLLM_FAILPOINTS"] = "rpc.execute@rank1#3=raise"
    with make_executor() as executor:
        for i in range(6):
            if i == 2:
                with raises(RemoteError, "rank 1", "FailpointError"):
                    executor.collective_rpc("echo", args=(i,), unique_reply_rank=0)
            else:
                assert executor.collective_rpc("echo", args=(i,), unique_reply_rank=0) == i


def test_every_span_of_the_executor_is_in_the_catalogue() -> None:
    import re

    root = Path(tracing.__file__).resolve().parents[1]
    emitted = set()
    for file in [*(root / "executor").glob("*.py"), root / "worker" / "worker_base.py"]:
        emitted |= set(re.findall(r"(?:span|instrument)\(\s*\"([a-z_.]+)\"", file.read_text()))
    assert len(emitted) > 50 and emitted <= set(tracing.catalogue.SPANS), emitted - set(
        tracing.catalogue.SPANS
    )


@pytest.mark.parametrize("async_scheduling", [False, True])
@scenario()
def test_an_answer_that_is_no_longer_wanted_is_no_error(async_scheduling: bool) -> None:
    """The executor is shut down while methods run: their steps end, and say by what, and no timeline shows a failure."""
    with tempfile.TemporaryDirectory() as directory:
        tracing.configure("engine_core", trace_dir=directory, level="rpc")
        executor = make_executor(async_scheduling=async_scheduling)
        executor.collective_rpc("sleep", args=(1.5,), non_block=True)
        wait_until(
            lambda: all(status.executing for status in executor.status_snapshot()), 10, "both are in the call"
        )
        executor.shutdown()
        tracing.shutdown()
        store = TraceStore.open(directory)
    assert not [
        (span.name, span.status_message) for span in store.spans() if span.is_error or span.unfinished
    ]
    answers = [span for span in store.spans(name="rpc.enqueue_output") if span.get("ended_by")]
    assert [span.get("ended_by") for span in answers] == ["MessageQueueClosed"] * 2
