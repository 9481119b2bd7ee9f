"""The queue's promises, with both ends in one process; what needs several processes is in test_shm_processes.py."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from mq_helpers import FailsToLoad, cpu_seconds, equal, queue
from scenario import Skip, raises, scenario, slack, wait_until

from minivllm.distributed import mq_overflow, mq_stream, shm_segment, wakeup
from minivllm.distributed.mq_codec import SPARE
from minivllm.distributed.shm_broadcast import (
    MessageDecodeError,
    MessageQueue,
    MessageQueueClosed,
)
from minivllm.exceptions import ConfigError

CHUNK = 4096


def mappings() -> list[str]:
    """Mappings of queue segments in this process."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "/dev/shm/minivllm" in line]


def own_names() -> set[str]:
    """Names in /dev/shm that this process has made (others run on the machine, too)."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"minivllm-{os.getpid()}-")}


# What goes in comes out


OBJECTS: list[Any] = [
    None,
    7,
    b"",
    b"x",
    b"y" * CHUNK,
    b"y" * (CHUNK + 1),
    b"z" * 1_000_000,
    "text" * 5000,
    bytearray(b"abc" * 100_000),
    ("execute_model", (b"x" * 100_000, [1, 2]), {"k": b"w" * 70_000}, 0),
    np.arange(10),
    np.arange(200_000, dtype=np.float32).reshape(400, 500),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(20)[::2],
    np.array(3.5),
    np.array([], dtype=np.int8),
    [np.ones(3), {"a": np.zeros((2, 2), dtype=np.int64), "b": b"q" * 9000}, "end"],
]


@pytest.mark.parametrize("n_reader", [1, 3, 9])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_objects_arrive_equal_and_in_order(n_reader: int, chunks: int) -> None:
    with queue(n_reader, max_chunk_bytes=CHUNK, max_chunks=chunks) as (writer, readers):
        for _ in range(3):
            for obj in OBJECTS:
                writer.enqueue(obj, timeout=5)
                for reader in readers:
                    assert equal(obj, reader.dequeue(timeout=5))


def test_sizes_around_the_slot_border() -> None:
    with queue(1, max_chunk_bytes=CHUNK, max_chunks=2) as (writer, (reader,)):
        for size in range(CHUNK - 40, CHUNK + 10):
            for obj in (b"r" * size, ("p" * size), np.full(size - 200, 7, dtype=np.uint8)):
                writer.enqueue(obj, timeout=5)
                assert equal(obj, reader.dequeue(timeout=5))


@pytest.mark.parametrize("chunks", [2, 3])
def test_wrap_around_with_a_slow_and_a_fast_side(chunks: int) -> None:
    """B5: order and content are exact when the ring is full most of the time, and when it is empty most of the time."""
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=chunks) as (writer, readers):
        for slow_side in ("reader", "writer"):

            def write(slow: bool = slow_side == "writer") -> None:
                for number in range(100):
                    if slow and number % 10 == 0:
                        time.sleep(0.003)
                    writer.enqueue((number, "x" * (number * 60)), timeout=5)

            thread = threading.Thread(target=write)
            thread.start()
            for number in range(100):
                if slow_side == "reader" and number % 10 == 0:
                    time.sleep(0.003)
                for reader in readers:
                    assert reader.dequeue(timeout=5) == (number, "x" * (number * 60))
            thread.join()


def test_the_four_states_of_a_slot() -> None:
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=2) as (writer, readers):

        def states() -> list[tuple[str, bool, tuple[bool, ...]]]:
            return [(s.state, s.written, s.read_by) for s in writer.snapshot()]

        fresh = ("free", False, (True, True))
        assert states() == [fresh, fresh]
        writer.enqueue("a")
        assert states() == [("written", True, (False, False)), fresh]
        readers[1].dequeue()
        assert states() == [("partly read", True, (False, True)), fresh]
        writer.enqueue("b" * 2 * CHUNK)
        readers[0].dequeue()
        assert states() == [("free", True, (True, True)), ("written", True, (False, False))]
        assert [s.overflow for s in readers[0].snapshot()] == [False, True]
        assert readers[0].snapshot()[1].length > 2 * CHUNK


# Copies


def test_a_received_array_never_changes_and_can_be_written() -> None:
    """B8, L23: nothing that was received refers to the ring or to an overflow segment."""
    with queue(1, max_chunk_bytes=1 << 20, max_chunks=3) as (writer, (reader,)):
        for size in (1000, 100_000, 3_000_000):
            kept = []
            for number in range(12):
                writer.enqueue(
                    {"array": np.full(size, number, dtype=np.uint8), "raw": bytes([number]) * size}
                )
                kept.append(reader.dequeue())
            for number, message in enumerate(kept):
                assert (message["array"] == number).all() and message["raw"] == bytes([number]) * size
                message["array"][0] = 99


def test_a_sent_object_may_be_changed_after_the_call() -> None:
    """B8, L24."""
    with queue(1, max_chunk_bytes=CHUNK, max_chunks=4) as (writer, (reader,)):
        for size in (100, 20_000_000):
            array = np.full(size, 1, dtype=np.uint8)
            buffer = bytearray(b"1" * size)
            writer.enqueue((array, buffer))
            array[:] = 9
            buffer[:] = b"9" * size
            got_array, got_buffer = reader.dequeue()
            assert (got_array == 1).all() and got_buffer == b"1" * size


def test_read_only_arrays_stay_read_only() -> None:
    array = np.arange(1000)
    array.flags.writeable = False
    with queue(1) as (writer, (reader,)):
        writer.enqueue(array)
        assert not reader.dequeue().flags.writeable


def test_neither_end_keeps_the_last_message() -> None:
    """B10."""
    with queue(1, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        for size in (10, 100_000):
            sent = np.zeros(size)
            sent_ref = weakref.ref(sent)
            writer.enqueue({"payload": sent})
            received = reader.dequeue()
            received_ref = weakref.ref(received["payload"])
            del sent, received
            assert sent_ref() is None and received_ref() is None


# Messages that fail


def test_what_cannot_be_pickled_leaves_the_ring_untouched() -> None:
    """Invariant 3, also when half of it has been pickled already."""
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=2) as (writer, readers):
        before = writer.snapshot()
        for obj in (lambda: None, [b"x" * 200_000, np.ones(100), lambda: None], FailsToDump()):
            with pytest.raises(Exception, match=r"pickle|dump"):
                writer.enqueue(obj)
            assert writer.snapshot() == before
        writer.enqueue(["next"])
        assert [reader.dequeue() for reader in readers] == [["next"], ["next"]]
        assert writer.snapshot()[0].length < 50, "something of a failed message went with it"


class FailsToDump:
    def __reduce__(self) -> Any:
        raise ValueError("does not dump")


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_cannot_be_unpickled_costs_one_message(size: int) -> None:
    """B9, L8, L9: the slot is released, the error has its cause, the next message arrives, on every reader."""
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=2, name="q") as (writer, readers):
        for number in range(5):
            writer.enqueue(FailsToLoad(size))
            writer.enqueue(number)
            for reader in readers:
                with pytest.raises(
                    MessageDecodeError, match=r"'q'.*RuntimeError: cannot be built here"
                ) as caught:
                    reader.dequeue()
                assert isinstance(caught.value.__cause__, RuntimeError)
                assert reader.dequeue() == number
        assert [s.state for s in writer.snapshot()] == ["free", "free"]


@scenario(limit_s=20)
def test_an_interrupted_dequeue_consumes_nothing() -> None:
    """Ctrl-C while waiting, and in the middle of unpickling: the message is still there afterwards."""
    with queue(1) as (writer, (reader,)):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with raises(KeyboardInterrupt, within_s=0.5):
            reader.dequeue()
        writer.enqueue(SlowToLoad())
        writer.enqueue("after")
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with raises(KeyboardInterrupt, within_s=0.5):
            reader.dequeue()
        assert reader.dequeue() == "slow"
        assert reader.dequeue() == "after"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class SlowToLoad:
    def __reduce__(self) -> Any:
        return (_slow, ())


def _slow() -> str:
    time.sleep(0.5)
    return "slow"


# Large messages, which are read while they are written


class Pause:
    """Stops the writer of a large message in the middle, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None = None) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real = mq_stream.write
        monkeypatch.setattr(wakeup, "_checks", wakeup._ALONE)
        monkeypatch.setattr(mq_stream, "MIN_BYTES", 50_000)

        def write(pieces: list[Any], *place: Any) -> None:
            def slow() -> Any:
                for piece in pieces:
                    with memoryview(piece) as whole:
                        half = len(whole) // 2
                        yield bytes(whole[:half])
                        if half > 10_000:
                            self.reached.set()
                            assert self.go.wait(10)
                            if error is not None:
                                raise error
                        yield bytes(whole[half:])

            real(slow(), *place)

        monkeypatch.setattr(mq_stream, "write", write)


def test_whether_there_is_a_message() -> None:
    with queue(2, max_chunks=2) as (writer, (first, second)):
        assert not first.has_message()
        writer.enqueue(1)
        assert first.has_message() and second.has_message()
        assert first.dequeue(0) == 1
        assert not first.has_message() and second.has_message()
        second.shutdown("the reason")
        with pytest.raises(MessageQueueClosed, match="the reason"):
            second.has_message()


@pytest.mark.parametrize("sizes", [(30, 1_000_000), (600_000,), (524_288,), (300_000,), (54, 9_000_001, 7)])
def test_parts_are_not_small(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a piece that is small as a whole is copied by less than the second-level cache; nothing is announced too early."""
    monkeypatch.setattr(mq_stream, "MIN_PART_BYTES", 512 << 10)
    pieces = [random.randbytes(size) for size in sizes]
    whole = b"".join(pieces)
    copied = bytearray(len(whole))
    lengths: list[int] = []

    class View:
        def __setitem__(self, where: slice, part: memoryview) -> None:
            lengths.append(len(part))
            copied[where] = part

    class Words:
        last = 0

        def __setitem__(self, _: int, progress: int) -> None:
            assert progress > self.last and copied[:progress] == whole[:progress]
            self.last = progress

    words = Words()
    mq_stream.write(pieces, len(whole), View(), words, 0)  # type: ignore[arg-type]
    assert copied == whole and words.last == len(whole)
    assert all(length >= 512 << 10 or length in sizes for length in lengths)
    assert len(lengths) <= mq_stream._PARTS + len(sizes)


LARGE: list[Any] = [
    b"in one piece" * 60_000,
    ["before", b"in band" * 60_000, "after"],
    {"a": np.arange(80_000), "b": np.ones(30_000), "c": bytearray(b"z" * 90_000)},
    "text" * 100_000,
    b"raw" * 20_000,
]


@pytest.mark.parametrize("obj", LARGE, ids=["bytes", "in band", "out of band", "text", "raw"])
@pytest.mark.parametrize("chunk", [CHUNK, 2 << 20], ids=["overflow", "slot"])
def test_a_reader_follows_the_writer(obj: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has half of the message, waits for the rest, times out without consuming anything, and gets it whole."""
    obj = (
        b"in one piece" * 60_000 if chunk > CHUNK and len(obj) == 60_000 else obj
    )  # raw bytes fit into the slot
    with queue(1, max_chunk_bytes=chunk, max_chunks=2) as (writer, (reader,)):
        for _ in range(3):
            pause = Pause(monkeypatch)
            thread, errors = in_thread(lambda: writer.enqueue(obj))
            assert pause.reached.wait(5)
            for timeout in (0, 0.1):
                with raises(TimeoutError, "reader rank 0 waits for the writer", within_s=0.4):
                    reader.dequeue(timeout=timeout)
            threading.Timer(0.1, pause.go.set).start()
            assert equal(reader.dequeue(timeout=5), obj)
            thread.join()
            assert not errors
            monkeypatch.undo()


@pytest.mark.parametrize("obj", LARGE, ids=["bytes", "in band", "out of band", "text", "raw"])
def test_an_interrupted_writer_has_sent_nothing(obj: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the copy: readers, also one that has read half of it, go on with the next message."""
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=2) as (writer, readers):
        pause = Pause(monkeypatch, KeyboardInterrupt)
        thread, errors = in_thread(lambda: writer.enqueue(obj))
        assert pause.reached.wait(5)
        got: list[Any] = []
        taker, _ = in_thread(lambda: got.append(readers[0].dequeue(timeout=5)))
        time.sleep(0.1)
        pause.go.set()
        thread.join()
        assert isinstance(errors[0], KeyboardInterrupt)
        monkeypatch.undo()
        writer.enqueue("next")
        taker.join()
        assert got == ["next"] and readers[1].dequeue(timeout=5) == "next"
        writer.enqueue(obj)
        assert all(equal(reader.dequeue(timeout=5), obj) for reader in readers)


def test_shutdown_in_the_middle_of_a_large_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """L25: what vLLM waits for without an end, an announced payload that does not come."""
    with queue(1, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        pause = Pause(monkeypatch)
        thread, errors = in_thread(lambda: writer.enqueue(b"x" * 200_000))
        assert pause.reached.wait(5)
        threading.Timer(0.2, lambda: reader.shutdown("enough")).start()
        with raises(MessageQueueClosed, "enough", within_s=0.5):
            reader.dequeue()
        pause.go.set()
        thread.join()
        assert not errors


class RaisesOnLoad:
    """Errors of a message's own that look like those of a wait."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return (_raise, (self.kind, b"x" * 100_000))


def _raise(kind: type[Exception], _: bytes) -> None:
    raise kind("from within the message")


@pytest.mark.parametrize("kind", [TimeoutError, MessageQueueClosed])
def test_errors_of_a_message_are_not_those_of_the_wait(kind: type[Exception]) -> None:
    for chunk in (CHUNK, 1 << 20):
        with queue(1, max_chunk_bytes=chunk) as (writer, (reader,)):
            writer.enqueue(RaisesOnLoad(kind))
            writer.enqueue("next")
            with pytest.raises(MessageDecodeError, match="from within the message"):
                reader.dequeue()
            assert reader.dequeue() == "next"


# Deadlines


def test_no_time_means_now_or_never() -> None:
    """L26, I2: a negative time-out is not an endless one."""
    with queue(1, max_chunks=2) as (writer, (reader,)):
        for timeout in (0, -1, -1e9):
            started = time.monotonic()
            with pytest.raises(TimeoutError, match="reader rank 0 waits for the writer"):
                reader.dequeue(timeout=timeout)
            writer.enqueue(1, timeout=timeout)
            writer.enqueue(2, timeout=timeout)
            with pytest.raises(TimeoutError, match="the writer waits for reader rank 0"):
                writer.enqueue(3, timeout=timeout)
            assert time.monotonic() - started < 0.1 * slack()
            assert [reader.dequeue(timeout=timeout) for _ in range(2)] == [1, 2]


def test_deadlines_hold_on_both_sides() -> None:
    with queue(1, max_chunks=1, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        with raises(TimeoutError, within_s=0.5) as caught:
            reader.dequeue(timeout=0.2)
        assert caught.seconds >= 0.2
        writer.enqueue("x" * 10 * CHUNK)
        with raises(TimeoutError, within_s=0.5) as caught:
            writer.enqueue("y" * 10 * CHUNK, timeout=0.2)
        assert caught.seconds >= 0.2
        assert reader.dequeue() == "x" * 10 * CHUNK


def test_waiting_for_overflow_memory_has_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """L27: no part of a message has a time-out of its own; and what waits for readers is bounded."""
    monkeypatch.setenv("MINIVLLM_MQ_MAX_OVERFLOW_BYTES", str(250_000))
    with queue(1, max_chunks=10, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        sent = 0
        with raises(TimeoutError, "reader rank 0", within_s=0.6):
            for sent in range(10):
                writer.enqueue(bytes([sent]) * 100_000, timeout=0.3)
        assert sent == 2
        assert writer._overflow_writer.allocated_bytes <= 250_000
        assert reader.dequeue() == b"\0" * 100_000
        writer.enqueue(b"\2" * 100_000, timeout=0.3)
        assert [reader.dequeue()[0] for _ in range(2)] == [1, 2]
        # One message alone may be larger than the bound.
        writer.enqueue(b"big" * 1_000_000, timeout=0.3)
        assert reader.dequeue() == b"big" * 1_000_000


def test_waiting_costs_no_cpu() -> None:
    """B6: a writer on a full ring and a reader on an empty one sleep."""
    with queue(1, max_chunks=1) as (writer, (reader,)):
        before = cpu_seconds()
        with raises(TimeoutError):
            reader.dequeue(timeout=0.5)
        writer.enqueue(1)
        with raises(TimeoutError):
            writer.enqueue(2, timeout=0.5)
        assert cpu_seconds() - before < 0.1


def test_a_wait_can_be_cancelled_by_an_event() -> None:
    with queue(1) as (writer, (reader,)):
        cancel = threading.Event()
        threading.Timer(0.1, cancel.set).start()
        with raises(MessageQueueClosed, "cancelled", within_s=0.5):
            reader.dequeue(cancel=cancel, indefinite=True)
        writer.enqueue(1)
        assert reader.dequeue() == 1


def test_on_wait_is_called_and_may_end_the_wait() -> None:
    with queue(1, max_chunks=1) as (writer, (reader,)):
        calls: list[float] = []
        reader.on_wait = writer.on_wait = lambda: calls.append(time.monotonic())
        with raises(TimeoutError):
            reader.dequeue(timeout=0.5)
        assert len(calls) * slack() >= 5 and len(calls) <= 10
        writer.enqueue(1)
        with raises(TimeoutError):
            writer.enqueue(2, timeout=0.5)
        assert len(calls) * slack() >= 10 and len(calls) <= 20

        def fail() -> None:
            raise RuntimeError("rank 1 has died")

        writer.on_wait = reader.on_wait = fail
        with raises(RuntimeError, "rank 1 has died", within_s=0.3):
            writer.enqueue(2)
        assert reader.dequeue() == 1
        with raises(RuntimeError, "rank 1 has died", within_s=0.3):
            reader.dequeue(indefinite=True)
        writer.enqueue(3)
        assert reader.dequeue() == 3


# Shutdown


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize(
    "blocked", ["writer", "reader", "idle reader", "writer's handshake", "reader's handshake"]
)
def test_shutdown_wakes_whoever_is_inside(blocked: str) -> None:
    """L10, L13, L22: within 50 ms, with the reason as text, and the memory is gone afterwards."""
    mapped = len(mappings())
    writer = MessageQueue(2, 2, max_chunks=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    other = None
    if "handshake" not in blocked:
        other = MessageQueue.create_from_handle(writer.export_handle(), 1)
    if blocked == "writer":
        writer.enqueue(1)
        end, call = writer, lambda: writer.enqueue(2)
    elif "handshake" in blocked:
        end = writer if "writer" in blocked else reader
        call = end.wait_until_ready
    else:
        end, call = reader, lambda: reader.dequeue(indefinite=blocked == "idle reader")
    thread, errors = in_thread(call)
    time.sleep(0.45)  # an idle reader looks again by itself 0.41 and 0.66 s after it began
    started = time.monotonic()
    end.shutdown("worker 1 was killed by SIGKILL")
    thread.join(2)
    assert time.monotonic() - started < min(0.05 * slack(), 0.15)
    assert isinstance(errors[0], MessageQueueClosed) and str(errors[0]) == "worker 1 was killed by SIGKILL"
    for each in (writer, reader, other):
        if each is not None:
            each.shutdown()
    assert len(mappings()) == mapped
    for method in (lambda: end.enqueue(1), end.dequeue, end.wait_until_ready):
        with pytest.raises(MessageQueueClosed, match="SIGKILL"):
            method()


def test_shutdown_from_many_threads_at_once() -> None:
    """F6, L21, L37: no exception, also against calls that are running, and the first reason counts."""
    for number in range(50):
        with queue(1, max_chunks=2) as (writer, (reader,)):
            callers = [in_thread(lambda r=reader: [r.dequeue(indefinite=True) for _ in range(1000)])]
            callers += [in_thread(lambda w=writer: [w.enqueue(1) for _ in range(1000)])]
            barrier = threading.Barrier(8)

            def close(index: int, b: threading.Barrier = barrier, ends: Any = (writer, reader)) -> None:
                b.wait()
                for end in ends:
                    end.shutdown(f"by {index}")

            closers = [in_thread(lambda i=i: close(i)) for i in range(8)]
            for thread, errors in closers:
                thread.join(5)
                assert not errors, (number, errors)
            for thread, errors in callers:
                thread.join(5)
                assert not thread.is_alive()
                assert all(isinstance(error, MessageQueueClosed) and "by" in str(error) for error in errors)
    assert not mappings()


@scenario(limit_s=20)
def test_shutdown_from_a_signal_handler_that_interrupts_a_call() -> None:
    """It must neither wait for the lock that the interrupted call holds, nor unmap what that call uses."""
    for _ in range(20):
        with queue(1, max_chunks=1) as (writer, (reader,)):
            for end, call in (
                (reader, reader.dequeue),
                (writer, lambda w=writer: [w.enqueue(1), w.enqueue(2)]),
            ):
                signal.signal(signal.SIGALRM, lambda *_, e=end: e.shutdown("signal"))
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with raises(MessageQueueClosed, "signal", within_s=1.0):
                    call()
    assert not mappings()


@scenario(limit_s=30)
def test_signals_at_any_moment_lose_nothing() -> None:
    """A handler that runs between any two instructions of enqueue and dequeue (here: a thousand times a second)."""
    count = 0

    def tick(*_: object) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    with queue(1, max_chunks=2, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        for number in range(30_000):
            obj = (number, "x" * (number % 5000))
            writer.enqueue(obj)
            assert reader.dequeue() == obj
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert count > 100


def test_dropping_the_objects_gives_everything_back() -> None:
    """F8: without a call of shutdown."""
    gc.collect()
    before = own_names()
    descriptors = len(os.listdir("/proc/self/fd"))
    writer = MessageQueue(2, 2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(b"x" * 3_000_000)
    reader.dequeue()
    assert own_names() != before
    del writer, reader
    gc.collect()
    assert own_names() == before
    assert not mappings()
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Threads


def test_threads_may_share_an_end() -> None:
    """Invariant 1 of QueueEnd: nothing is lost or doubled, and each thread's messages stay in order."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with queue(1, max_chunks=3, max_chunk_bytes=CHUNK) as (writer, (reader,)):
            got: list[list[tuple[int, int, str]]] = [[], []]
            senders = [
                in_thread(lambda i=i: [writer.enqueue((i, n, "x" * (n * 7)), timeout=20) for n in range(500)])
                for i in range(4)
            ]
            takers = [
                in_thread(lambda mine=mine: [mine.append(reader.dequeue(timeout=20)) for _ in range(1000)])
                for mine in got
            ]
            for thread, errors in senders + takers:
                thread.join(40)
                assert not errors
            assert sorted(got[0] + got[1]) == [(i, n, "x" * (n * 7)) for i in range(4) for n in range(500)]
            for mine in got:
                for i in range(4):
                    numbers = [n for sender, n, _ in mine if sender == i]
                    assert numbers == sorted(numbers)
    finally:
        sys.setswitchinterval(interval)


def test_waiting_for_another_thread_has_a_deadline_too() -> None:
    with queue(1, max_chunks=1) as (writer, (reader,)):
        thread, errors = in_thread(lambda: reader.dequeue(timeout=1.0))
        time.sleep(0.1)
        with raises(TimeoutError, "another thread", within_s=0.5):
            reader.dequeue(timeout=0.2)
        writer.enqueue("for the first")
        thread.join(5)
        assert not errors


# Roles and readers


def test_each_end_has_its_role() -> None:
    with queue(2) as (writer, readers):
        with pytest.raises(RuntimeError, match="only a reader"):
            writer.dequeue(timeout=0)
        with pytest.raises(RuntimeError, match="only the writer"):
            readers[0].enqueue(1)
        with pytest.raises(ValueError, match="rank 7 is not a reader"):
            MessageQueue.create_from_handle(writer.export_handle(), 7)
        with pytest.raises(FileNotFoundError, match="all its readers have attached"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(ValueError, match="do not match"):
        MessageQueue(2, 3)
    with pytest.raises(ValueError, match="do not match"):
        MessageQueue(2, 2, [1])


def test_a_rank_attaches_once() -> None:
    writer = MessageQueue(2, 2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 1)
    with pytest.raises(RuntimeError, match="attached before"):
        MessageQueue.create_from_handle(writer.export_handle(), 1)
    reader.shutdown()
    writer.shutdown()


def test_the_handshake_names_who_is_missing() -> None:
    writer = MessageQueue(3, 3, [4, 5, 6], name="rpc_broadcast")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 5)
    with raises(TimeoutError, "rpc_broadcast", "rank 4, rank 6 to attach", within_s=0.5):
        writer.wait_until_ready(0.2)
    with raises(TimeoutError, "reader rank 5 waits for the writer", "to see all readers", within_s=0.5):
        reader.wait_until_ready(0.2)
    others = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in (4, 6)]
    for end in (writer, reader, *others):
        end.wait_until_ready(1)
        end.shutdown()


def test_messages_sent_before_the_readers_came_are_not_lost() -> None:
    """B7: there is no slow joiner; the ring keeps what was not read, an overflow segment too."""
    writer = MessageQueue(2, 2, max_chunk_bytes=CHUNK)
    writer.enqueue(b"first" * 10_000)
    writer.enqueue("second")
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    for reader in readers:
        assert [reader.dequeue(1), reader.dequeue(1)] == [b"first" * 10_000, "second"]
    for end in (writer, *readers):
        end.shutdown()


# Memory


def test_the_name_is_gone_as_soon_as_all_have_attached() -> None:
    """F4, L31."""
    writer = MessageQueue(2, 2)
    assert writer.handle.buffer_handle is not None
    path = "/dev/shm/" + writer.handle.buffer_handle[3]
    first = MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert os.path.exists(path)
    second = MessageQueue.create_from_handle(writer.export_handle(), 1)
    assert not os.path.exists(path)
    for end in (writer, first, second):
        end.shutdown()


def test_overflow_segments_are_used_again_and_bounded() -> None:
    """B10: memory does not grow with the number of messages, nor with slowly growing ones."""
    with queue(2, max_chunk_bytes=CHUNK, max_chunks=4) as (writer, readers):
        for number in range(200):
            obj = bytes([number % 250]) * (50_000 + 997 * number)
            writer.enqueue(obj)
            for reader in readers:
                assert reader.dequeue() == obj
        assert writer._overflow_writer.allocated_bytes <= 600_000
        assert all(reader._overflow_reader.attached <= 2 for reader in readers)
        # Not needed for a while: given back by the writer, and by readers when they next sleep.
        for number in range(4 * (mq_overflow._IDLE_LAPS + 2)):
            writer.enqueue(number)
            for reader in readers:
                reader.dequeue()
        assert writer._overflow_writer.allocated_bytes == 0
        for reader in readers:
            with raises(TimeoutError):
                reader.dequeue(timeout=0.05)
            assert reader._overflow_reader.attached == 0


def test_an_outgrown_segment_is_kept_until_its_message_is_read() -> None:
    """Found by the property test: at the end of a lap the first slot of the next one has not been given up."""
    with queue(1, max_chunk_bytes=CHUNK, max_chunks=4) as (writer, (reader,)):
        sent = [b"1" * 5_000, "small", "small", b"2" * 70_000]
        for obj in sent:
            writer.enqueue(obj)
        assert [reader.dequeue() for _ in sent] == sent


def test_pages_of_a_huge_message_are_freed_by_its_last_reader() -> None:
    """The writer may be idle for ever afterwards."""
    with queue(2, max_chunk_bytes=CHUNK) as (writer, readers):
        writer.enqueue(bytes(mq_overflow._KEEP_BYTES + 1))
        (block,) = writer._overflow_writer._blocks
        blocks = lambda: os.fstat(block.segment.fd).st_blocks * 512  # noqa: E731
        assert blocks() > mq_overflow._KEEP_BYTES
        readers[0].dequeue()
        assert blocks() > mq_overflow._KEEP_BYTES
        readers[1].dequeue()
        assert blocks() == 0
        writer.enqueue("small")
        assert [reader.dequeue() for reader in readers] == ["small"] * 2


def test_overflow_where_descriptors_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other platforms, other pid namespaces: named segments, whose names are gone after the first use."""
    monkeypatch.setattr(shm_segment.SharedSegment, "same_as_descriptor", lambda *_: False)
    before = own_names()
    with queue(2, max_chunk_bytes=CHUNK) as (writer, readers):
        for size in (50_000, 60_000, 40_000_000):
            writer.enqueue(b"x" * size)
            assert own_names() != before or size == 60_000
            for reader in readers:
                assert reader.dequeue() == b"x" * size
            assert own_names() == before


def test_a_writer_that_closes_takes_unread_overflow_with_it() -> None:
    with queue(1, max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue("small")
        writer.enqueue(b"x" * 100_000)
        writer.shutdown()
        assert reader.dequeue() == "small"
        for _ in range(2):
            with pytest.raises(MessageQueueClosed, match="closed before its message"):
                reader.dequeue()


def test_too_little_shared_memory_is_said_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = own_names()
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shm_segment, "free_bytes", lambda: 12_345_678)
    with raises(ConfigError, "10.0 MiB", "12345678 bytes", "MINIVLLM_MQ_MAX_CHUNK_BYTES", "--shm-size"):
        MessageQueue(1, 1, max_chunk_bytes=1 << 20, max_chunks=10)
    assert own_names() == before
    with raises(ConfigError, "MINIVLLM_MQ_MAX_CHUNKS"):
        MessageQueue(1, 1, max_chunk_bytes=100)


@scenario(limit_s=20)
def test_a_small_dev_shm() -> None:
    """J1 for real: a mount namespace with 8 MiB. Too large a ring is refused; a small one works, also for a message
    that is larger than what is left."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(0x00020000) != 0 or libc.mount(b"none", b"/", None, 0x44000, None) != 0
    ):  # CLONE_NEWNS; private
        raise Skip(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=8m") != 0:
        raise Skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    with raises(ConfigError, "10.0 MiB", "8.0 MiB) are free", "MINIVLLM_MQ_MAX_CHUNK_BYTES"):
        MessageQueue(1, 1, max_chunk_bytes=1 << 20, max_chunks=10)
    assert os.listdir("/dev/shm") == []
    with queue(1, max_chunk_bytes=1 << 18, max_chunks=10) as (writer, (reader,)):
        for number in range(25):
            writer.enqueue(bytes([number]) * 250_000)
            assert reader.dequeue() == bytes([number]) * 250_000
        writer.enqueue(b"x" * 50_000_000)
        assert reader.dequeue() == b"x" * 50_000_000


def in_spare(end: MessageQueue) -> bool:
    """Whether the message that was sent last lies in the spare place."""
    ring = end.buffer
    return bool(ring.words[ring.slots[end.current_idx - 1][3]] & SPARE)


def test_large_messages_use_warm_memory_again_when_readers_keep_up() -> None:
    """The spare place takes memory with the first of them, is left alone while it is unread, and small ones pass it by."""
    large = lambda number: bytes([number]) * 300_000  # noqa: E731
    with queue(2, max_chunk_bytes=1 << 20, max_chunks=3) as (writer, readers):
        segment = writer.buffer.segment
        taken = lambda: os.fstat(segment.fd).st_blocks * 512  # noqa: E731
        without = taken()
        assert without < segment.size
        for number in range(5):
            writer.enqueue(large(number))
            assert in_spare(writer)
            writer.enqueue("small")
            assert not in_spare(writer)
            for reader in readers:
                assert [reader.dequeue(), reader.dequeue()] == [large(number), "small"]
        assert without + (1 << 20) <= taken() <= segment.size + 4096
        # One reader is late: what comes meanwhile goes into the slots.
        for number in range(3):
            writer.enqueue(large(number))
            assert in_spare(writer) == (number == 0)
        assert [readers[0].dequeue() for _ in range(3)] == [large(0), large(1), large(2)]
        assert readers[1].dequeue() == large(0)
        writer.enqueue(large(3))
        # Written to the slot that the last one in the spare place had: all have read that one.
        assert in_spare(writer)
        assert [readers[1].dequeue() for _ in range(3)] == [large(1), large(2), large(3)]
        assert readers[0].dequeue() == large(3)


def test_a_segment_gets_its_whole_size_at_once_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a second ftruncate of shared memory fails."""
    sizes = []
    real = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: (sizes.append(size), real(fd, size)))
    monkeypatch.setattr(shm_segment.sys, "platform", "darwin")
    segment = shm_segment.SharedSegment.create(4096, "it", spare=8192)
    assert sizes == [segment.size] == [12288] and segment.reserve_spare(8192)
    segment.close()


def test_no_memory_for_the_spare_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then large messages lie in their slots, and nobody asks again."""
    asked = []

    def full(*what: int) -> None:
        asked.append(what)
        raise OSError(errno.ENOSPC, "No space left on device")

    with queue(1, max_chunk_bytes=1 << 20, max_chunks=2) as (writer, (reader,)):
        monkeypatch.setattr(os, "posix_fallocate", full)
        for number in range(5):
            writer.enqueue(bytes([number]) * 300_000)
            assert not in_spare(writer)
            assert reader.dequeue() == bytes([number]) * 300_000
        assert len(asked) == 1


# Tracing


@scenario(limit_s=20, env={"MINIVLLM_TRACE": "message"})
def test_spans_and_context() -> None:
    import tempfile

    from minivllm import tracing

    with (
        tempfile.TemporaryDirectory() as directory,
        queue(1, max_chunk_bytes=CHUNK, name="rpc_broadcast") as ends,
    ):
        writer, (reader,) = ends
        writer.enqueue("before")
        assert reader.dequeue() == "before" and reader.last_context == b""
        tracing.configure("client", trace_dir=directory)
        with tracing.span("rpc.call") as call:
            writer.enqueue("small")
            writer.enqueue(b"x" * 10_000)
        assert reader.dequeue() == "small"
        context = reader.last_context
        assert len(context) == 25 and context[:16] == call.context[:16] and context != call.context
        assert reader.dequeue() == b"x" * 10_000
        tracing.shutdown()
        writer.enqueue("after")
        assert reader.dequeue() == "after" and reader.last_context == b""

        from minivllm.trace_store import TraceStore

        store = TraceStore.open(directory)
        sent, received = store.spans("mq.enqueue"), store.spans("mq.dequeue")
        assert [(s.get("queue"), s.get("slot"), s.get("overflow")) for s in sent] == [
            ("rpc_broadcast", 1, False),
            ("rpc_broadcast", 2, True),
        ]
        assert [s.links[0].span_id for s in received] == [s.span_id for s in sent]
        for s in sent:
            assert s.get("bytes") > 0 and min(s.get("wait_ns"), s.get("copy_ns"), s.get("notify_ns")) >= 0
        for s in received:
            assert min(s.get("spin_ns"), s.get("sleep_ns"), s.get("unpickle_ns")) >= 0


# Memory that is received into


@scenario(limit_s=20)
def test_received_memory_is_used_again() -> None:
    """The pages of large objects that were dropped serve the next ones: to clear new ones takes longer than to copy."""
    payload = b"x" * 1_000_000
    with queue(4) as (writer, readers):
        for round_ in range(25):
            if round_ == 15:  # by then each slot has been touched by each reader
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            writer.enqueue(payload)
            received = [reader.dequeue(5) for reader in readers]
            del received
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
        )  # 9,000 if they are given back


# Names that were left


def test_stale_segments_are_found_and_live_ones_are_not() -> None:
    writer = MessageQueue(1, 1)
    pid = os.fork()
    if pid == 0:
        leaked = MessageQueue(1, 1)
        os.kill(os.getpid(), signal.SIGKILL)
        del leaked
    os.waitpid(pid, 0)
    (name,) = [n for n in shm_segment.list_stale_segments() if n.startswith(f"minivllm-{pid}-")]
    # A dead creator is not enough while somebody has the segment: it may live in another pid namespace.
    fd = os.open(f"/dev/shm/{name}", os.O_RDWR)
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_SH)
    assert name not in shm_segment.list_stale_segments()
    os.close(fd)
    assert name in shm_segment.clean_stale_segments()
    assert writer.handle.buffer_handle is not None
    assert os.path.exists("/dev/shm/" + writer.handle.buffer_handle[3])
    writer.shutdown()
    wait_until(lambda: not os.path.exists(f"/dev/shm/{name}"), 1, "the segment is removed")
