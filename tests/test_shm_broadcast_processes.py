"""The queue between real processes: stopped, killed, idle, started again and again, and under load."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from typing import Any

import pytest
from mq_helpers import Peer, cpu_seconds, queue
from scenario import Skip, own_segments, raises, scenario, slack, wait_until

from minivllm.distributed import shm_segment, wakeup
from minivllm.distributed.shm_broadcast import Handle, MessageQueue, MessageQueueClosed

CHUNK = 4096


def echo(reader: MessageQueue, conn: Any) -> None:
    """Tell the parent what has come, until None comes."""
    conn.send("ready")
    while (obj := reader.dequeue(indefinite=True)) is not None:
        conn.send(obj)


def start(writer: MessageQueue, n: int, body: Any = echo, *args: Any) -> list[Peer]:
    peers = [Peer(writer.export_handle(), rank, body, *args) for rank in range(n)]
    writer.wait_until_ready(20)
    return peers


# A reader that does not read


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("minivllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@scenario(limit_s=30, env={"MINIVLLM_MQ_WARNING_INTERVAL_S": "0.3"})
def test_a_stopped_reader_is_named() -> None:
    """B1, B6, L13: SIGSTOP of one reader; the warning and the error say which, and waiting costs no CPU."""
    records = Records()
    writer = MessageQueue(2, 2, max_chunks=10, name="rpc_broadcast")
    peers = start(writer, 2)
    for peer in peers:
        assert peer.receive() == "ready"
    records.texts.clear()
    assert peers[1].pid is not None
    os.kill(peers[1].pid, signal.SIGSTOP)
    for number in range(10):
        writer.enqueue(number, timeout=1)
    before = cpu_seconds()
    with raises(
        TimeoutError, "'rpc_broadcast'", "reader rank 1", "stopped", "slot 0", within_s=1.5
    ) as caught:
        writer.enqueue(10, timeout=1)
    assert caught.seconds >= 1.0
    assert cpu_seconds() - before < 0.2
    assert len(records.texts) >= 2
    for text in records.texts:
        assert "the writer waits for reader rank 1" in text and "rank 0" not in text and "s so far" in text
    # It goes on where it stopped, and nothing is lost.
    os.kill(peers[1].pid, signal.SIGCONT)
    writer.enqueue(10, timeout=5)
    writer.enqueue(None, timeout=5)
    for peer in peers:
        assert [peer.receive() for _ in range(11)] == list(range(11))
        assert peer.join() == 0
    writer.shutdown()


@scenario(limit_s=30, env={"MINIVLLM_MQ_WARNING_INTERVAL_S": "0.2"})
def test_who_warns_and_who_does_not() -> None:
    """No message while an idle worker waits for work; a reader that expects an answer says whom it waits for."""
    records = Records()
    with queue(1, name="response 0") as (_, (reader,)):
        with raises(TimeoutError):
            reader.dequeue(timeout=0.7, indefinite=True)
        assert records.texts == []
        with raises(TimeoutError):
            reader.dequeue(timeout=0.7)
        assert len(records.texts) == 3
        assert f"'response 0': reader rank 0 waits for the writer (pid {os.getpid()}" in records.texts[0]


@scenario(limit_s=30)
def test_a_blocked_writer_is_ended_when_the_reader_has_died() -> None:
    """B6: what the executor's monitor does once it has seen the death."""
    import threading

    writer = MessageQueue(1, 1, max_chunks=2)
    (peer,) = start(writer, 1, sleep_for_ever)
    writer.enqueue(1)
    writer.enqueue(2)
    threading.Timer(0.5, lambda: (peer.kill(), writer.shutdown("worker 0 was killed by SIGKILL"))).start()
    with raises(MessageQueueClosed, "worker 0 was killed by SIGKILL", within_s=1.0):
        writer.enqueue(3)
    peer.end()


def sleep_for_ever(reader: MessageQueue, conn: Any) -> None:
    time.sleep(1000)


# Wake-ups


@scenario(limit_s=40)
def test_a_reader_killed_in_its_sleep_does_not_disturb_the_others() -> None:
    """Its sleep flag stays up and its place in the ring unread: others get all messages until the ring is full."""
    writer = MessageQueue(3, 3, max_chunks=4)
    peers = start(writer, 3)
    for peer in peers:
        assert peer.receive() == "ready"
    time.sleep(0.3)
    peers[1].kill()
    for number in range(4):
        writer.enqueue(number, timeout=1)
        for rank in (0, 2):
            assert peers[rank].receive() == number
    with raises(TimeoutError, "reader rank 1", "dead", within_s=1.0):
        writer.enqueue(4, timeout=0.3)
    for peer in peers:
        peer.end()
    writer.shutdown()


@scenario(limit_s=60)
def test_lost_wake_ups_cost_a_moment() -> None:
    """B4, L36: every third wake-up is swallowed; each message still arrives within the re-check interval."""
    real, calls, lost = wakeup.futex_wake, 0, 0

    def lossy(address: int) -> None:
        # Only called when somebody sleeps, so each of those swallowed here is missed.
        nonlocal calls, lost
        calls += 1
        if calls % 3:
            real(address)
        else:
            lost += 1

    writer = MessageQueue(2, 2)
    peers = start(writer, 2)
    for peer in peers:
        assert peer.receive() == "ready"
    wakeup.futex_wake = lossy
    time.sleep(2)
    for number in range(12):
        time.sleep(0.3)  # sleepers look again 0.24 and 0.41 s after the last message
        started = time.monotonic()
        writer.enqueue(number)
        for peer in peers:
            assert peer.receive() == number
        seconds = time.monotonic() - started
        assert seconds < 0.5 * slack()
    assert lost >= 3, "no wake-up was lost: the test tests nothing"
    wakeup.futex_wake = real
    writer.enqueue(None)
    for peer in peers:
        assert peer.join() == 0
    writer.shutdown()


@scenario(limit_s=40)
def test_sleepers_are_woken_at_once() -> None:
    """The re-check is a safety net: the ordinary way is a wake-up, far quicker than the fifth of a second it takes."""
    writer = MessageQueue(2, 2)
    peers = start(writer, 2)
    for peer in peers:
        assert peer.receive() == "ready"
    times = []
    for number in range(7):
        time.sleep(0.45)
        started = time.monotonic()
        writer.enqueue(number)
        for peer in peers:
            assert peer.receive() == number
        times.append(time.monotonic() - started)
    assert sorted(times)[len(times) // 2] < min(0.02 * slack(), 0.1), times
    writer.enqueue(None)
    for peer in peers:
        assert peer.join() == 0
    writer.shutdown()


@pytest.mark.parametrize("cores", [1, 2])
@scenario(limit_s=40)
def test_a_wait_gives_the_core_away_a_few_times_only(cores: int) -> None:
    """Each time costs a slice in the scheduler's books: who polls by yields is made to wait for long by whoever computes.

    The looks before a move to another core are yields, too. On each core one process computes, and one naps so shortly that a look
    ends early and is followed by another one.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise Skip("this platform has no way to keep two processes on one core")
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    if len(allowed) < cores:
        raise Skip(f"this machine has fewer than {cores} cores for us")
    busy = []
    for core in allowed:
        for nap_s in (0, 0.0005):
            busy.append(os.fork())
            if busy[-1] == 0:
                os.sched_setaffinity(0, {core})
                while True:
                    if nap_s:
                        time.sleep(nap_s)
    os.sched_setaffinity(0, allowed)
    yields: list[float] = []

    def counted() -> None:
        begun = time.monotonic()
        os.sched_yield()
        yields.append(time.monotonic() - begun)

    wakeup._sched_yield = counted  # type: ignore[misc]
    try:
        with queue() as (_, (reader,)):
            assert reader.buffer is not None
            reader.buffer.readers_wake.spin_s = 1.0
            for _ in range(4):
                yields.clear()
                with raises(TimeoutError):
                    reader.dequeue(timeout=1)
                long = [seconds for seconds in yields if seconds > 100 * wakeup.CROWDED_S]
                assert 1 <= len(long) <= wakeup.MOST_YIELDS, yields[-20:]
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@scenario(limit_s=40)
def test_who_shares_a_core_moves_to_another() -> None:
    """At once when it has been alone before, and ever more rarely where it does not help; the set of allowed cores stays."""
    from minivllm.distributed.shared_core import SharedCore, current_core

    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if current_core is None or len(allowed) < 2:
        raise Skip("one core, or a platform on which a thread cannot choose")
    here = min(allowed)
    os.sched_setaffinity(0, {here})
    os.sched_setaffinity(0, allowed)
    company = True
    core, now = SharedCore(lambda: company), 100.0
    for _ in range(19):
        core.taken_up(now, 5e-6, 4)
    assert core.moves == 0, "a few short ones are nothing yet"
    for _ in range(61):
        core.taken_up(now, 5e-6, 4)
    assert core.moves == 1 and current_core() != here
    assert os.sched_getaffinity(0) == allowed
    # A second of company that nothing helps against.
    for number in range(10_000):
        core.taken_up(now + number / 10_000, 5e-6, 4)
    assert 2 <= core.moves <= 7
    before = core.moves
    for _ in range(4):
        core.taken_up(now + 2, 100e-6, 4)
    assert core.moves == before + 1, (
        "alone for a second, and then not, so at once; a few are enough if they take long"
    )
    # Another second, of company that computes for 10 ms each time: that is not being alone in between.
    for number in range(100):
        core.taken_up(now + 2 + (number + 1) / 100, 10e-3, 4)
    assert before + 2 <= core.moves <= before + 7
    before = core.moves
    # The other one has just left by itself, or was moved by the kernel.
    company = False
    for _ in range(80):
        core.taken_up(now + 4, 5e-6, 4)
    assert core.moves == before
    company = True
    # Company that computes is asked once: what is waited for may be there meanwhile.
    asked: list[int] = []
    for number in range(10):
        other = SharedCore(lambda number=number: asked.append(number) or time.sleep(0.002) is None)  # type: ignore[misc]
        for _ in range(80):
            other.taken_up(now, 5e-6, 4)
    assert asked == list(range(10))
    # With a single core there is nowhere to go.
    os.sched_setaffinity(0, {here})
    for _ in range(80):
        core.taken_up(now + 5, 5e-6, 4)
    assert core.moves == before and os.sched_getaffinity(0) == {here}


@scenario(limit_s=40)
def test_an_idle_reader_uses_no_cpu() -> None:
    """C1, L35: neither while nothing comes, nor spinning after each of a few messages."""
    writer = MessageQueue(2, 2)
    peers = start(writer, 2)
    for peer in peers:
        assert peer.receive() == "ready"
    time.sleep(0.5)
    assert all(peer.pid is not None for peer in peers)
    before = [cpu_seconds(peer.pid or 0) for peer in peers]
    time.sleep(3)
    idle = [cpu_seconds(peer.pid or 0) - b for peer, b in zip(peers, before, strict=True)]
    assert max(idle) <= 0.05, idle
    before = [cpu_seconds(peer.pid or 0) for peer in peers]
    for number in range(8):
        time.sleep(0.25)
        writer.enqueue(number)
        for peer in peers:
            assert peer.receive() == number
    busy = [cpu_seconds(peer.pid or 0) - b for peer, b in zip(peers, before, strict=True)]
    assert max(busy) <= 0.1, busy
    writer.enqueue(None)
    for peer in peers:
        assert peer.join() == 0
    writer.shutdown()


# Starting and ending


@scenario(limit_s=60)
def test_a_large_first_message_arrives_in_each_of_50_starts() -> None:
    """B7: there is no connection that could be too late."""
    writers = [MessageQueue(2, 2, max_chunk_bytes=CHUNK) for _ in range(50)]
    handles = [writer.export_handle() for writer in writers]
    control = MessageQueue(2, 2)
    peers = start(control, 2, count_first_messages)
    control.enqueue(handles)
    for number, writer in enumerate(writers):
        if number % 2:
            writer.wait_until_ready(20)
        writer.enqueue(bytes([number]) * 50_000, timeout=10)
    for peer in peers:
        assert peer.receive() == 50
        assert peer.join() == 0
    for end in (*writers, control):
        end.shutdown()


def count_first_messages(control: MessageQueue, conn: Any) -> None:
    right = 0
    handles: list[Handle] = control.dequeue()
    for number, handle in enumerate(handles):
        reader = MessageQueue.create_from_handle(handle, control.local_reader_rank)
        right += reader.dequeue(timeout=10) == bytes([number]) * 50_000
        reader.shutdown()
    conn.send(right)


CYCLE = """
import multiprocessing, sys
from minivllm.distributed.shm_broadcast import MessageQueue

def reader(handle, back):
    requests = MessageQueue.create_from_handle(handle, 0)
    answers = MessageQueue(1, 1)
    back.send(answers.export_handle())
    requests.wait_until_ready(20)
    answers.wait_until_ready(20)
    answers.enqueue(requests.dequeue(timeout=20))
    if not CARELESS:
        requests.shutdown()
        answers.shutdown()

CARELESS = len(sys.argv) > 1
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        for number in range(10):
            requests = MessageQueue(1, 1, max_chunk_bytes=4096)
            mine, theirs = context.Pipe()
            process = context.Process(target=reader, args=(requests.export_handle(), theirs))
            process.start()
            answers = MessageQueue.create_from_handle(mine.recv(), 0)
            requests.wait_until_ready(20)
            answers.wait_until_ready(20)
            requests.enqueue(b"x" * 10_000 + bytes([number]))
            assert answers.dequeue(timeout=20)[-1] == number
            process.join()
            assert process.exitcode == 0
            process.close()
            mine.close()
            theirs.close()
            if not CARELESS:
                requests.shutdown()
                answers.shutdown()
    print("done")
"""


@scenario(limit_s=120)
def test_30_starts_and_stops_say_nothing() -> None:
    """F3, F4, L33: no warning of the resource tracker or of anybody else, and nothing left."""
    _run_cycles([])


@scenario(limit_s=120)
def test_ends_that_are_never_shut_down_say_nothing_either() -> None:
    _run_cycles(["careless"])


def _run_cycles(arguments: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "cycle.py")
        with open(path, "w") as file:
            file.write(CYCLE)
        process = subprocess.Popen(
            [sys.executable, "-W", "error", path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = process.communicate(timeout=110)
    assert (out, err, process.returncode) == (b"done\n", b"", 0)
    assert [n for n in os.listdir("/dev/shm") if n.startswith(f"minivllm-{process.pid}-")] == []


@scenario(limit_s=30)
@pytest.mark.parametrize("victim", ["reader", "writer"])
def test_sigkill_leaves_no_shared_memory(victim: str) -> None:
    """F4, L31: the names were removed when all had attached, whoever dies afterwards."""
    writer = MessageQueue(1, 1, max_chunk_bytes=CHUNK)
    (peer,) = start(writer, 1, own_writer)
    handle = peer.receive()
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(5)
    writer.enqueue(b"x" * 100_000)
    writer.enqueue(b"x" * 40_000_000)
    assert len(reader.dequeue(timeout=5)) == 100_000
    assert own_segments() == set()
    peer.kill()
    assert own_segments() == set()
    if victim == "writer":
        with raises(TimeoutError, "the writer", "dead"):
            reader.dequeue(timeout=0.1)
    peer.end()
    reader.shutdown()
    writer.shutdown()


def own_writer(reader: MessageQueue, conn: Any) -> None:
    answers = MessageQueue(1, 1, max_chunk_bytes=CHUNK)
    conn.send(answers.export_handle())
    answers.wait_until_ready(10)
    answers.enqueue(b"y" * 100_000)
    time.sleep(1000)


@scenario(limit_s=30)
def test_what_a_sigkill_during_start_up_leaves_is_found_and_cleaned() -> None:
    code = (
        "import os, signal\n"
        "from minivllm.distributed.shm_broadcast import MessageQueue\n"
        "queue = MessageQueue(2, 2)\n"
        "first = MessageQueue.create_from_handle(queue.export_handle(), 0)\n"
        "queue.enqueue(b'x' * 3_000_000)\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL
    mine = f"minivllm-{process.stdout.strip()}-"
    # The ring and, since not all readers had attached, the overflow segment.
    assert len([name for name in shm_segment.list_stale_segments() if name.startswith(mine)]) == 2
    assert len([name for name in shm_segment.clean_stale_segments() if name.startswith(mine)]) == 2
    assert [name for name in os.listdir("/dev/shm") if name.startswith(mine)] == []


@scenario(limit_s=30)
def test_a_forked_child_does_not_touch_its_parents_queue() -> None:
    """It inherits both ends: neither its shutdown nor its exit may unlink, drain or close anything of the parent's."""
    writer = MessageQueue(2, 2)
    first = MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert writer.handle.buffer_handle is not None
    path = "/dev/shm/" + writer.handle.buffer_handle[3]
    for close in (True, False):
        pid = os.fork()
        if pid == 0:
            if close:
                writer.shutdown()
                first.shutdown()
            del writer, first
            import gc

            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.path.exists(path)
    second = MessageQueue.create_from_handle(writer.export_handle(), 1)
    writer.enqueue(b"x" * 2_000_000)
    assert first.dequeue(timeout=1) == second.dequeue(timeout=1) == b"x" * 2_000_000
    for end in (writer, first, second):
        end.shutdown()


@scenario(limit_s=30)
def test_exit_while_a_daemon_thread_is_inside() -> None:
    """Interpreter exit with a blocked call: no crash, no message, no name left."""
    code = (
        "import threading, time\n"
        "from minivllm.distributed.shm_broadcast import MessageQueue\n"
        "queue = MessageQueue(2, 2, max_chunks=1)\n"
        "reader = MessageQueue.create_from_handle(queue.export_handle(), 0)\n"
        "queue.enqueue(1)\n"
        "reader.dequeue()\n"
        "for call in (reader.dequeue, lambda: queue.enqueue(2), queue.wait_until_ready):\n"
        "    threading.Thread(target=call, daemon=True).start()\n"
        "time.sleep(0.3)\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=20)
        assert (err, process.returncode) == (b"", 0)
        assert [n for n in os.listdir("/dev/shm") if n.startswith(f"minivllm-{process.pid}-")] == []


# Much


def make_message(number: int, seed: random.Random) -> tuple[int, int, bytes]:
    kind = seed.random()
    size = int(seed.random() * (300 if kind < 0.97 else 3000 if kind < 0.999 else 60_000))
    body = bytes([number & 255]) * size
    return number, zlib.crc32(body), body


def check_messages(reader: MessageQueue, conn: Any, count: int) -> None:
    for number in range(count):
        got, crc, body = reader.dequeue(timeout=30)
        assert got == number, f"{got} came instead of {number}"
        assert zlib.crc32(body) == crc, f"message {number} is torn"
    conn.send("all right")


@scenario(limit_s=120)
@pytest.mark.parametrize(("n_reader", "count"), [(1, 80_000), (3, 20_000)])
def test_many_messages_arrive_whole_and_in_order(n_reader: int, count: int) -> None:
    """B2: sequence numbers and check sums; the long version is tests/benchmarks/stress_mq.py."""
    writer = MessageQueue(n_reader, n_reader, max_chunk_bytes=CHUNK, max_chunks=3)
    peers = start(writer, n_reader, check_messages, count)
    seed = random.Random(7)
    for number in range(count):
        writer.enqueue(make_message(number, seed), timeout=30)
    for peer in peers:
        assert peer.receive(60) == "all right"
        assert peer.join() == 0
    writer.shutdown()


def measure_growth(reader: MessageQueue, conn: Any, count: int) -> None:
    import psutil

    me = psutil.Process()
    for _ in range(2000):
        reader.dequeue(timeout=30)
    conn.send("warm")
    before = me.memory_info().rss
    for _ in range(count):
        reader.dequeue(timeout=30)
    conn.send(me.memory_info().rss - before)


@scenario(limit_s=120)
def test_memory_does_not_grow_with_the_number_of_messages() -> None:
    """B10."""
    import psutil

    count = 60_000
    writer = MessageQueue(1, 1, max_chunk_bytes=CHUNK)
    (peer,) = start(writer, 1, measure_growth, count)
    for number in range(2000):
        writer.enqueue(("execute_model", number, {"a": [number]}))
    assert peer.receive() == "warm"
    before = psutil.Process().memory_info().rss
    for number in range(count):
        writer.enqueue(("execute_model", number, {"a": [number]}))
    assert peer.receive(60) < 2 << 20
    assert psutil.Process().memory_info().rss - before < 2 << 20
    assert peer.join() == 0
    writer.shutdown()


def keep_nothing(reader: MessageQueue, conn: Any) -> None:
    import gc
    import weakref

    obj = reader.dequeue(timeout=20)
    ref = weakref.ref(obj)
    del obj
    gc.disable()
    conn.send(ref() is None)
    with raises(TimeoutError):
        reader.dequeue(timeout=0.2, indefinite=True)
    conn.send(reader._overflow_reader.attached)


@scenario(limit_s=40)
def test_the_last_message_is_not_kept() -> None:
    """B10: 64 MiB sent once, then nothing: gone in the reader at once, and the shared memory with it."""
    import numpy as np

    writer = MessageQueue(1, 1)
    (peer,) = start(writer, 1, keep_nothing)
    writer.enqueue(np.zeros(64 << 20, dtype=np.uint8))
    assert peer.receive() is True
    assert peer.receive() == 0
    (block,) = writer._overflow_writer._blocks
    wait_until(lambda: os.fstat(block.segment.fd).st_blocks == 0, 1, "the pages are freed")
    assert peer.join() == 0
    writer.shutdown()
