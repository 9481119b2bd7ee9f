"""collective_rpc: numbers, deadlines, exceptions, futures (part 2 §2.1, §2.3.7, §2.4.10–13)."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
from executor_helpers import make_executor
from scenario import in_threads, raises, scenario, slack, wait_until
from workers import FailsToLoad

from minivllm.distributed.shm_broadcast import MessageQueue
from minivllm.exceptions import ExecutorFailedError, RemoteError


@scenario()
def test_replies() -> None:
    """All ranks in rank order, one rank, a callable by value, keyword arguments, an unknown method."""
    with make_executor() as executor:
        assert [rank for rank, _ in executor.collective_rpc("identify")] == [0, 1]
        assert executor.collective_rpc("identify", unique_reply_rank=1)[0] == 1
        assert executor.collective_rpc("echo", kwargs={"value": 3}) == [3, 3]
        base = 40
        assert executor.collective_rpc(lambda worker, x: worker.rank + base + x, args=(2,)) == [42, 43]
        with raises(RemoteError, "rank 0", "no_such_method", "AttributeError"):
            executor.collective_rpc("no_such_method")
        with raises(RemoteError, "TypeError", "echo"):
            executor.collective_rpc("echo", args=(1, 2, 3))
        assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]


@scenario()
def test_K8_callable_that_cannot_be_pickled_harms_nobody() -> None:
    with make_executor() as executor:
        lock = threading.Lock()
        with raises(TypeError, "pickle"):
            executor.collective_rpc(lambda worker: lock)
        with raises(TypeError, "pickle"):
            executor.collective_rpc("echo", args=(lock,))
        assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]


@scenario()
def test_aggregation() -> None:
    """With an aggregator every rank replies and one result comes out (part 2 §2.3.7)."""

    class Sum:
        def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
            return sum(rank for rank, _ in outputs), output_rank

    class Broken:
        def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
            raise ZeroDivisionError("cannot merge")

    with make_executor() as executor:
        call = executor.collective_rpc
        assert call("identify", unique_reply_rank=1, kv_output_aggregator=Sum()) == (1, 1)
        assert call("identify", kv_output_aggregator=Sum(), non_block=True).result() == (1, 0)
        with raises(ZeroDivisionError, "cannot merge"):
            call("identify", kv_output_aggregator=Broken())
        assert call("echo", args=("after",)) == ["after", "after"]


# --- I1, I2: numbers and deadlines --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
@scenario()
def test_I1_L1_no_stale_response_after_a_failed_rank(rank: int, asynchronous: bool) -> None:
    """Obligation 1: after a failure on one rank the next call gets its own answers."""
    with make_executor(async_scheduling=asynchronous) as executor:
        for i in range(20):
            with raises(RemoteError, f"rank {rank}", "boom"):
                executor.collective_rpc("fail_on", args=(rank,))
            assert executor.collective_rpc("echo", args=(i,)) == [i, i]


@scenario()
def test_I1_L2_no_stale_response_after_a_timeout() -> None:
    """Obligation 2: a late response is dropped, also when a later call asks another rank."""
    with make_executor() as executor:
        with raises(TimeoutError, "sleep", "0.2 s", "rank 1", "finished: rank 0", within_s=0.5):
            executor.collective_rpc("sleep", args=(0.6, "old", 1), timeout=0.2)
        assert executor.collective_rpc("echo", args=("new",)) == ["new", "new"]
        for _ in range(12):  # more than a response ring has slots
            with raises(TimeoutError):
                executor.collective_rpc("sleep", args=(0.02, "old"), timeout=0.001)
        assert executor.collective_rpc("echo", args=("new",), unique_reply_rank=0) == "new"
        assert executor.collective_rpc("echo", args=("newer",)) == ["newer", "newer"]


@scenario()
def test_I1_L4_no_stale_response_after_an_interrupt() -> None:
    """Ctrl-C in a call: the call is given up, the executor goes on, and the children print nothing."""
    with make_executor() as executor:
        for i in range(5):
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with raises(KeyboardInterrupt):
                executor.collective_rpc("sleep", args=(0.6, "old"))
            timer.join()
            assert executor.collective_rpc("echo", args=(i,)) == [i, i]


@scenario(limit_s=60)
def test_L4_interrupts_at_any_moment() -> None:
    """300 interrupts, each somewhere in a call: no lock is left locked, and no answer goes to the wrong call."""
    rng = random.Random(3)
    shooting, stop = threading.Event(), threading.Event()

    def shoot() -> None:
        while not stop.is_set():
            time.sleep(rng.random() * 0.004)
            if shooting.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    with make_executor() as executor:
        thread = threading.Thread(target=shoot)
        thread.start()
        number = interrupts = 0
        while interrupts < 300:
            try:
                shooting.set()
                while True:
                    number += 1
                    if number % 3 == 0:
                        got = executor.collective_rpc("echo", args=(number,))
                    elif number % 3 == 1:
                        got = [executor.collective_rpc("echo", args=(number,), unique_reply_rank=1)] * 2
                    else:
                        got = executor.collective_rpc("echo", args=(number,), non_block=True).result()
                    assert got == [number, number], (number, got)
            except KeyboardInterrupt:
                interrupts += 1
        shooting.clear()
        stop.set()
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt:
                pass
        assert executor.collective_rpc("echo", args=("after",), timeout=10) == ["after", "after"]


@scenario(limit_s=60)
def test_I1_every_answer_is_to_its_own_call() -> None:
    """500 random calls: good, failing, late, non-blocking, interrupted; each result carries its own number."""
    rng = random.Random(7)
    with make_executor() as executor:
        futures: list[tuple[int, Any]] = []
        for i in range(500):
            kind = rng.choice(["echo", "echo", "one", "fail", "late", "future", "future", "unloadable"])
            if kind == "echo":
                assert executor.collective_rpc("echo", args=(i,)) == [i, i]
            elif kind == "one":
                assert executor.collective_rpc("echo", args=(i,), unique_reply_rank=i % 2) == i
            elif kind == "fail":
                with raises(RemoteError, f"call {i}."):
                    executor.collective_rpc("fail_on", args=(rng.choice([0, 1, -1]), f"call {i}."))
            elif kind == "late":
                with raises(TimeoutError):
                    executor.collective_rpc("sleep", args=(0.05, -i, rng.choice([0, 1, -1])), timeout=0.002)
            elif kind == "unloadable":
                with raises(RuntimeError, "cannot be loaded"):
                    executor.collective_rpc("return_unloadable", args=(rng.choice([0, 1, -1]),))
            else:
                futures.append((i, executor.collective_rpc("echo", args=(i,), non_block=True)))
            if futures and rng.random() < 0.3:
                number, future = futures.pop(rng.randrange(len(futures)))
                assert future.result() == [number, number]
        for number, future in futures:
            assert future.result() == [number, number]


@scenario()
def test_I2_deadline_of_the_whole_call() -> None:
    """Three ranks that are each 0.4 s late do not get three limits; 0 and -1 raise at once and send nothing."""
    with make_executor(tp=3) as executor:
        with raises(TimeoutError, "identify_late") as caught:
            executor.collective_rpc(identify_late, timeout=0.6, args=(0.4,))
        assert 0.55 <= caught.seconds <= 0.9 * slack(), caught.seconds
        for limit in (0, -1):
            with raises(TimeoutError, "was not sent", within_s=0.05):
                executor.collective_rpc("echo", timeout=limit)
        assert executor.collective_rpc("echo", args=(1,)) == [1, 1, 1]


def identify_late(worker: Any, seconds: float) -> int:
    time.sleep(seconds * (1 + worker.rank))
    return int(worker.rank)


@scenario()
def test_I2_older_futures_count_towards_the_deadline() -> None:
    with make_executor() as executor:
        older = executor.collective_rpc("sleep", args=(0.8, "older"), non_block=True)
        with raises(TimeoutError, "echo", within_s=0.4):
            executor.collective_rpc("echo", timeout=0.2)
        assert older.result() == ["older", "older"]


@scenario(env={"MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0.3"})
def test_I3_D6_timeout_says_what_the_missing_rank_does() -> None:
    """A rank that spins for ever is named with what it does; others are named as finished."""
    with make_executor() as executor:
        with raises(TimeoutError, "spin", "missing: rank 1", "executing spin", "finished: rank 0"):
            executor.collective_rpc("spin", args=(1,), timeout=0.3)
        # The next call is not answered by rank 1 either, and says what is in the way.
        with raises(TimeoutError, "echo", "rank 1", "executing spin", within_s=0.6):
            executor.collective_rpc("echo", timeout=0.3)
        assert executor.collective_rpc("echo", args=(1,), unique_reply_rank=0, non_block=True) is not None


@scenario(env={"MINIVLLM_EXECUTE_MODEL_TIMEOUT_S": "0.3"})
def test_L38_every_step_has_a_limit() -> None:
    with make_executor() as executor:
        pid = executor.workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for step in (
                executor.execute_dummy_batch,
                executor.take_draft_token_ids,
                lambda: executor.execute_model(None),  # type: ignore[arg-type]
                lambda: executor.sample_tokens(None),
            ):
                with raises(TimeoutError, "0.3 s", f"rank 0 (pid {pid}", within_s=0.6):
                    step()
        finally:
            os.kill(pid, signal.SIGCONT)
        output = executor.sample_tokens(None)
        assert output is not None and output.req_ids == ["0"]  # type: ignore[union-attr]


@scenario()
def test_I10_health_check_names_the_silent_rank() -> None:
    with make_executor() as executor:
        executor.check_health()
        pid = executor.workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with raises(TimeoutError, "check_health", f"rank 1 (pid {pid}", "worker.busy_loop", within_s=1.0):
                executor.collective_rpc("check_health", timeout=0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert executor.collective_rpc("echo", args=("own",)) == ["own", "own"]


@scenario()
def test_B6_L13_a_full_ring_ends_at_the_deadline() -> None:
    """Obligation 5: a reader that does not read fills the ring; the writer waits without burning a core, and no longer
    than it may; a death ends its wait."""
    with make_executor() as executor:
        pid = executor.workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        sent = 0
        cpu = time.process_time()
        with raises(TimeoutError, "was not sent", "rank 1"):
            while sent < 100:
                executor.collective_rpc(
                    "echo", unique_reply_rank=0, non_block=True, timeout=1 if sent > 5 else 30
                )
                sent += 1
        assert time.process_time() - cpu < 0.3
        assert sent == 10
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with raises(ExecutorFailedError, "rank 1", "SIGKILL", within_s=0.8):
            executor.collective_rpc("echo")


# --- I5, I8, I9, B9: exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@scenario()
def test_I5_L5_exception_on_a_rank_that_need_not_reply(asynchronous: bool) -> None:
    """Obligation 3: reply asked of rank 0 only, rank 1 raises: the caller of this call hears of it."""
    with make_executor(async_scheduling=asynchronous) as executor:
        for i in range(20):
            with raises(RemoteError, "rank 1", "KeyError", "boom") as caught:
                executor.collective_rpc("fail_on", args=(1,), unique_reply_rank=0)
            assert isinstance(caught.error, RemoteError) and caught.error.rank == 1
            assert executor.collective_rpc("echo", args=(i,), unique_reply_rank=0) == i


@scenario()
def test_I8_L6_exceptions_arrive_whole() -> None:
    """Obligation 11: type, message and traceback, whatever the exception is like."""
    expected = {
        "key": ("KeyError", "'boom'"),
        "assert": ("AssertionError", "(no message)"),
        "odd": ("workers.Odd", "its __str__ raised ValueError"),
        "note": ("ValueError", "look here"),
    }
    with make_executor() as executor:
        for kind, (type_name, message) in expected.items():
            with raises(RemoteError, type_name, message) as caught:
                executor.collective_rpc("raise_kind", args=(kind,))
            error = caught.error
            assert isinstance(error, RemoteError)
            assert (error.rank, error.method, error.type_name) == (0, "raise_kind", type_name)
            assert 'workers.py", line' in error.remote_traceback and "raise_kind" in error.remote_traceback
            if sys.version_info >= (3, 11):
                assert error.__notes__ == [f"rank 1 failed, too: {type_name}: {error.remote_message}"]
        assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]


def _fail_one_after_the_other(worker: Any) -> None:
    time.sleep(0.02 * worker.rank)
    raise KeyError("boom")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
@pytest.mark.parametrize("asynchronous", [False, True])
@scenario()
def test_I8_a_failure_that_comes_between_two_looks_is_named(asynchronous: bool) -> None:
    """Rank 1 finishes, with a failure, after its ring was looked at and before its state is."""
    with make_executor(async_scheduling=asynchronous) as executor:
        responses = executor._rpc.responses
        behind = responses.behind

        def later(number: int) -> list[int]:
            wait_until(lambda: not behind(number), 2, "rank 1 has finished")
            return behind(number)

        responses.behind = later  # type: ignore[method-assign]
        for _ in range(3):
            with raises(RemoteError, "rank 0", "boom") as caught:
                executor.collective_rpc(_fail_one_after_the_other)
            assert caught.error.__notes__ == ["rank 1 failed, too: KeyError: 'boom'"]
            assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]


@pytest.mark.parametrize("asynchronous", [False, True])
@scenario()
def test_I9_L7_output_that_cannot_be_sent(asynchronous: bool) -> None:
    """Obligation 13: an error response, with the output thread too, and the next call is fine."""
    with make_executor(async_scheduling=asynchronous) as executor:
        for method in ("return_lambda", "late_lambda"):
            with raises(RemoteError, "rank 0", method, "pickle"):
                executor.collective_rpc(method, timeout=5)
            assert executor.collective_rpc("echo", args=("after",), timeout=5) == ["after", "after"]
        with raises(RemoteError, "the copy failed"):
            executor.collective_rpc("late_error", timeout=5)
        with raises(RemoteError, "the copy failed"):
            executor.collective_rpc("late_error", timeout=5, unique_reply_rank=1)
        assert executor.collective_rpc("late", args=(5,), unique_reply_rank=1) == 5
        assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]


@scenario()
def test_B9_L8_L9_messages_that_cannot_be_unpickled_cost_one_call() -> None:
    """Obligation 14: a bad argument, a bad result on all ranks or on one."""
    with make_executor() as executor:
        for i in range(3):
            with raises(RemoteError, "cannot be loaded"):
                executor.collective_rpc("echo", args=(FailsToLoad(),))
            with raises(RemoteError, "cannot be loaded"):
                executor.collective_rpc("echo", args=(FailsToLoad(),), unique_reply_rank=1)
            assert executor.collective_rpc("echo", args=(i,)) == [i, i]
            for rank in (-1, 0, 1):
                with raises(RuntimeError, "return_unloadable", "cannot be loaded"):
                    executor.collective_rpc("return_unloadable", args=(rank,))
                assert executor.collective_rpc("echo", args=(i,)) == [i, i]


@scenario()
def test_A8_D7_failure_while_another_rank_waits_for_it() -> None:
    """Rank 1 raises where rank 0 waits for it: the caller hears in < 0.5 s, for either way of replying, and the
    executor goes on when rank 0 comes back."""
    with make_executor() as executor:
        for reply in (0, None):
            with raises(RemoteError, "rank 1", "before the all-reduce", within_s=0.5):
                executor.collective_rpc("fail_before_peer", args=(1, 1.0), unique_reply_rank=reply)
            # Not sent before rank 0 is back: a rank that is a step ahead would match the wrong collectives.
            started = time.monotonic()
            assert executor.collective_rpc("echo", args=("after",)) == ["after", "after"]
            assert time.monotonic() - started > 0.3
        assert not executor.is_failed


@scenario(env={"MINIVLLM_WORKER_STUCK_TIMEOUT_S": "0.5"})
def test_D7_executor_fails_when_the_other_rank_stays_stuck() -> None:
    called: list[float] = []
    with make_executor() as executor:
        executor.register_failure_callback(lambda: called.append(time.monotonic()))
        with raises(RemoteError, "rank 1", within_s=0.5):
            executor.collective_rpc("fail_before_peer", args=(1, 1000.0), unique_reply_rank=0)
        with raises(TimeoutError, "was not sent", "rank 0", "executing fail_before_peer"):
            executor.collective_rpc("echo", timeout=0.1)
        with raises(
            ExecutorFailedError, "rank 0 did not come back", "fail_before_peer", "before the all-reduce"
        ):
            executor.collective_rpc("echo")
        assert executor.is_failed
        executor.shutdown()
        assert len(called) == 1


# --- I4, I6: futures ----------------------------------------------------------------------------------------------


@scenario()
def test_I4_futures_keep_the_order_and_any_may_be_asked_first() -> None:
    with make_executor() as executor:
        first, second, third = (executor.collective_rpc("echo", args=(i,), non_block=True) for i in range(3))
        assert third.result() == [2, 2]
        assert first.done() and second.done()
        assert (first.result(), second.result()) == ([0, 0], [1, 1])


@scenario()
def test_I4_a_rank_goes_on_with_the_next_call_while_another_is_busy() -> None:
    """What fills a pipeline: rank 0 begins the second call before rank 1 has ended the first."""

    def wait_for_the_other(worker: Any, flag: str, number: int) -> bool:
        """On rank 1 the first call ends when rank 0 has begun the second."""
        if worker.rank == 0 and number == 2:
            open(flag, "w").close()
        deadline = time.monotonic() + 20
        while worker.rank == 1 and number == 1 and not os.path.exists(flag):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    with make_executor(tp=1, pp=2) as executor, tempfile.TemporaryDirectory() as directory:
        flag = f"{directory}/begun"
        first, second = (
            executor.collective_rpc(wait_for_the_other, args=(flag, number), non_block=True)
            for number in (1, 2)
        )
        assert second.result() == first.result() == [True, True]
        assert executor.collective_rpc("identify", unique_reply_rank=executor.output_rank)[0] == 1


@scenario()
def test_L3_done_tells_the_truth_without_result() -> None:
    with make_executor() as executor:
        future = executor.collective_rpc("sleep", args=(0.2, 5), non_block=True)
        assert not future.done()
        time.sleep(0.4)
        assert future.done() and future.result(0) == [5, 5]
        late = executor.collective_rpc("sleep", args=(0.4,), non_block=True, timeout=0.1)
        time.sleep(0.2)
        assert late.done() and isinstance(late.exception(), TimeoutError)
        failing = executor.collective_rpc("fail_on", args=(1,), non_block=True, unique_reply_rank=0)
        time.sleep(0.5)
        assert failing.done() and isinstance(failing.exception(), RemoteError)


@scenario()
def test_I6_result_with_timeout_and_cancel() -> None:
    with make_executor() as executor:
        future = executor.collective_rpc("sleep", args=(0.5, 1), non_block=True)
        with raises(TimeoutError, within_s=0.3):
            future.result(0.1)
        assert future.result(2) == [1, 1]
        cancelled = executor.collective_rpc("sleep", args=(0.1, "old"), non_block=True)
        assert cancelled.cancel() and cancelled.cancelled() and cancelled.done()
        with raises(concurrent.futures.CancelledError):
            cancelled.result()
        assert executor.collective_rpc("echo", args=("new",)) == ["new", "new"]


@scenario()
def test_I6_wait_and_callbacks_work_without_result() -> None:
    """Obligation 12, second half: concurrent.futures.wait, as_completed, callbacks; a callback may make calls."""
    with make_executor() as executor:
        futures = [executor.collective_rpc("sleep", args=(0.05, i), non_block=True) for i in range(3)]
        done, left = concurrent.futures.wait(futures, timeout=5)
        assert len(done) == 3 and not left
        results: list[Any] = []
        event = threading.Event()

        def callback(future: concurrent.futures.Future[Any]) -> None:
            results.append(future.result())
            results.append(executor.collective_rpc("echo", args=("inner",)))
            event.set()

        executor.collective_rpc("sleep", args=(0.1, "outer"), non_block=True).add_done_callback(callback)
        assert executor.collective_rpc("echo", args=("foreground",)) == ["foreground", "foreground"]
        assert event.wait(5)
        assert results == [["outer", "outer"], ["inner", "inner"]]


@scenario(limit_s=60)
def test_I6_L3_many_threads() -> None:
    """Obligation 12: four threads with 200 calls each, blocking and not, all on one executor."""
    with make_executor() as executor:

        def work(name: int) -> None:
            rng = random.Random(name)
            for i in range(200):
                value = (name, i)
                kind = rng.random()
                if kind < 0.4:
                    got = executor.collective_rpc("echo", args=(value,))
                elif kind < 0.8:
                    got = executor.collective_rpc("echo", args=(value,), non_block=True).result(30)
                else:
                    future = executor.collective_rpc("echo", args=(value,), non_block=True)
                    concurrent.futures.wait([future], 30)
                    got = future.result(0)
                assert got == [value, value], (value, got)

        assert in_threads(4, work) == [None] * 4


@scenario()
def test_I6_one_future_in_many_threads() -> None:
    with make_executor() as executor:
        for i in range(50):
            future = executor.collective_rpc("echo", args=(i,), non_block=True)
            assert in_threads(3, lambda _, future=future: future.result(10)) == [[i, i]] * 3


@scenario()
def test_K7_many_calls_before_one_is_read() -> None:
    """More than all rings hold: the responses are taken while the next call waits for room."""
    with make_executor() as executor:
        futures = [executor.collective_rpc("echo", args=(i,), non_block=True) for i in range(100)]
        assert [future.result() for future in futures] == [[i, i] for i in range(100)]
        big = os.urandom(2 << 20)
        assert executor.collective_rpc("echo", args=(big,)) == [big, big]


@scenario()
def test_async_scheduling_overlaps_waiting_with_the_next_call() -> None:
    """The output thread waits for the device while the loop runs the next method (part 2 §2.4.11)."""
    with make_executor(async_scheduling=True) as executor:
        assert "WorkerAsyncOutputCopy" in executor.collective_rpc("threads")[0]
        assert executor.max_concurrent_batches == 2
        started = time.monotonic()
        futures = [executor.collective_rpc("late", args=(i, 0.3), non_block=True) for i in range(1)]
        futures += [executor.collective_rpc("sleep", args=(0.3, 1), non_block=True)]
        assert [future.result() for future in futures] == [[0, 0], [1, 1]]
        assert time.monotonic() - started < 0.5 * slack()


@scenario()
def test_B10_L40_arguments_and_outputs_are_not_kept() -> None:
    """After a call nothing of it is held in the worker, nor in the caller."""
    with make_executor(async_scheduling=True) as executor:
        executor.collective_rpc("watch", args=({1, 2},))
        assert executor.collective_rpc("is_watched_alive") == [False, False]


@scenario()
def test_B8_L23_L24_arrays_are_copies_on_both_sides() -> None:
    """Obligation 15: what a worker keeps never changes, what the sender changes afterwards is not seen."""
    import numpy as np

    with make_executor() as executor:
        array = np.full(1 << 18, 7, dtype=np.int64)
        executor.collective_rpc("keep", args=(array,), non_block=True)
        array[:] = 9
        for i in range(12):
            executor.collective_rpc("echo", args=(np.full(1 << 18, i),), unique_reply_rank=0)
        kept = executor.collective_rpc("get_kept")
        assert all((value == 7).all() for value in kept)


@scenario(limit_s=60)
def test_B10_memory_does_not_grow() -> None:
    def resident(worker: Any = None) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with make_executor() as executor:
        for _ in range(1000):
            executor.collective_rpc("echo")
        before = [resident(), *executor.collective_rpc(resident)]
        for i in range(20000):
            executor.collective_rpc("echo", args=(i,), unique_reply_rank=i % 2)
        after = [resident(), *executor.collective_rpc(resident)]
        growth = [b - a for a, b in zip(before, after, strict=True)]
        assert max(growth) < 2 << 20, growth


@scenario()
def test_C1_idle_costs_nothing() -> None:
    """Obligation 18: two idle seconds cost each process next to no time."""
    import psutil

    with make_executor() as executor:
        executor.collective_rpc("echo")
        time.sleep(0.5)
        processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in executor.workers)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(2)
        used = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
        assert max(used) <= 0.03, used


@scenario()
def test_a_look_at_ranks_that_have_not_answered_raises_nothing() -> None:
    """A Ctrl-C that comes during one shows one traceback: no time-out is being handled then."""
    missed: list[Any] = []
    real = MessageQueue.dequeue

    def dequeue(self: MessageQueue, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(self, timeout, *args, **kwargs)
        except TimeoutError:
            missed.append(timeout)
            raise

    with make_executor() as executor:
        MessageQueue.dequeue = dequeue  # type: ignore[method-assign]
        executor.collective_rpc("sleep", args=(0.3,))
        executor.collective_rpc("sleep", args=(0.3,), unique_reply_rank=1)
    assert missed == [], missed
