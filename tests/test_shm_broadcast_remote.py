"""Readers on other hosts (here: other processes, by TCP), and queues of process groups on one and on two nodes."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import warm_processes
from mq_helpers import FailsToLoad, Peer, equal
from scenario import raises, scenario, slack

from minivllm.distributed import mq_groups, mq_remote
from minivllm.distributed.shm_broadcast import MessageDecodeError, MessageQueue, MessageQueueClosed
from minivllm.exceptions import ConfigError

HAS_IPV6 = socket.has_ipv6 and os.path.exists("/proc/net/if_inet6")
ADDRESSES = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here"))]


def listening() -> set[str]:
    """Local addresses (hex, as the kernel writes them) at which this process's sockets listen."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(name):
            with open(name) as file:
                for line in file.readlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        found.add(fields[1])
    return found


def collect(reader: MessageQueue, conn: Any, count: int, slow: bool = False) -> None:
    for number in range(count):
        if slow and number % 500 == 0:
            time.sleep(0.01)
        conn.send(reader.dequeue(timeout=20))


def check_numbers(reader: MessageQueue, conn: Any, count: int, slow: bool) -> None:
    for number in range(count):
        if slow and number % 1000 == 0:
            time.sleep(0.02)
        assert reader.dequeue(timeout=20) == (number, "x" * (number % 300))
    conn.send("all right")


OBJECTS: list[Any] = [
    b"",
    b"raw" * 1000,
    {"a": [1, "two"]},
    np.arange(100_000),
    [b"y" * 20_000_000, np.ones(2_000_000)],
]


@pytest.mark.parametrize("ip", ADDRESSES)
def test_local_and_remote_readers_get_the_same(ip: str) -> None:
    """G1: 1 KiB and 20 MiB, IPv4 and IPv6; the socket is bound to the one address that was given (G4)."""
    _local_and_remote(ip=ip)


@scenario(limit_s=40)
def _local_and_remote(ip: str) -> None:
    writer = MessageQueue(3, 1, [5], max_chunk_bytes=4096, connect_ip=ip, name="rpc_broadcast")
    address = writer.handle.remote_subscribe_addr
    assert address is not None
    port = int(address.rpartition(":")[2])
    expected = "0100007F" if ip == "127.0.0.1" else "0" * 24 + "01000000"
    assert listening() == {f"{expected}:{port:04X}"}
    assert "secret" not in repr(writer.handle) and len(writer.handle.secret) == 32
    peers = [Peer(writer.export_handle(), rank, collect, len(OBJECTS)) for rank in (5, 6, 7)]
    writer.wait_until_ready(20)
    for obj in OBJECTS:
        writer.enqueue(obj, timeout=20)
        for peer in peers:
            assert equal(peer.receive(), obj)
    for peer in peers:
        assert peer.join() == 0
    writer.shutdown()


@scenario(limit_s=30)
def test_without_remote_readers_nothing_listens() -> None:
    """G4."""
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(b"x" * 3_000_000)
    reader.dequeue()
    assert listening() == set()
    reader.shutdown()
    writer.shutdown()
    # Nor is ZMQ, torch or numpy imported.
    code = (
        "import sys\n"
        "from minivllm.distributed.shm_broadcast import MessageQueue\n"
        "MessageQueue(1, 1).shutdown()\n"
        "sys.exit(str({'zmq', 'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


@scenario(limit_s=60)
def test_a_burst_to_a_slow_reader_arrives_whole() -> None:
    """G5, L29: back-pressure instead of silent drops; 15000 small messages, no gap."""
    count = 15_000
    writer = MessageQueue(2, 0, connect_ip="127.0.0.1", max_chunks=10)
    peers = [Peer(writer.export_handle(), rank, check_numbers, count, rank == 1) for rank in range(2)]
    writer.wait_until_ready(20)
    for number in range(count):
        writer.enqueue((number, "x" * (number % 300)), timeout=20)
    for peer in peers:
        assert peer.receive(40) == "all right"
        assert peer.join() == 0
    writer.shutdown()


def remote_pair(**kwargs: Any) -> tuple[MessageQueue, MessageQueue]:
    """Writer and one remote reader in this process, ready."""
    import threading

    writer = MessageQueue(1, 0, connect_ip="127.0.0.1", name="response 3", **kwargs)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 3)
    thread = threading.Thread(target=writer.wait_until_ready, args=(10,))
    thread.start()
    reader.wait_until_ready(10)
    thread.join()
    return writer, reader


def test_deadlines_and_the_window() -> None:
    """G5, L26: the writer waits when `max_chunks` messages are not acknowledged; no negative time-out is endless."""
    writer, reader = remote_pair(max_chunks=3)
    try:
        for number in range(3):
            writer.enqueue(number, timeout=0)
        with raises(TimeoutError, "'response 3'", "remote reader rank 3", within_s=1.0) as caught:
            writer.enqueue(3, timeout=0.2)
        assert caught.seconds >= 0.2
        assert [reader.dequeue(timeout=5) for _ in range(3)] == [0, 1, 2]
        for timeout in (0, -1, 0.1):
            with raises(TimeoutError, "remote reader rank 3 waits for the writer", within_s=0.5):
                reader.dequeue(timeout=timeout)
        writer.enqueue("next", timeout=5)
        assert reader.dequeue(timeout=5) == "next"
    finally:
        reader.shutdown()
        writer.shutdown()


def test_shutdown_wakes_both_sides() -> None:
    """G5, L28: also whoever waits in the handshake."""
    import threading

    for blocked in ("reader", "writer", "handshake"):
        if blocked == "handshake":
            writer = MessageQueue(2, 0, connect_ip="127.0.0.1")
            reader = MessageQueue.create_from_handle(writer.export_handle(), 1)
            end, call = reader, reader.wait_until_ready
        else:
            writer, reader = remote_pair(max_chunks=1)
            end = reader if blocked == "reader" else writer
            call = lambda r=reader: r.dequeue(indefinite=True)  # noqa: E731
            if blocked == "writer":
                writer.enqueue(1)
                call = lambda w=writer: w.enqueue(2)  # noqa: E731
        stamps: list[float] = []

        def close(end: MessageQueue = end, stamps: list[float] = stamps) -> None:
            stamps.append(time.monotonic())
            end.shutdown("enough")

        # An idle reader looks again by itself 0.41 and 0.66 s after it began.
        threading.Timer(0.45, close).start()
        with raises(MessageQueueClosed, "enough"):
            call()
        assert time.monotonic() - stamps[0] < min(0.1 * slack(), 0.15), blocked
        reader.shutdown()
        writer.shutdown()


def test_failing_messages_cost_one_message() -> None:
    """B9 for remote readers."""
    writer, reader = remote_pair()
    try:
        with pytest.raises(Exception, match="pickle"):
            writer.enqueue([np.ones(10), lambda: None])
        writer.enqueue(FailsToLoad())
        writer.enqueue("next")
        with pytest.raises(MessageDecodeError, match="cannot be built here"):
            reader.dequeue(timeout=5)
        assert reader.dequeue(timeout=5) == "next"
        array = np.ones(1000)
        writer.enqueue(array)
        array[:] = 2
        got = reader.dequeue(timeout=5)
        assert (got == 1).all()
        got[0] = 3
    finally:
        reader.shutdown()
        writer.shutdown()


def test_whoever_does_not_know_the_secret_gets_nothing_in() -> None:
    """G4: neither a reader with a wrong secret, nor rubbish, nor a replayed or forged message."""
    import zmq

    writer, reader = remote_pair(max_chunks=2)
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(writer.handle.remote_subscribe_addr)
        nonce, rank = os.urandom(16), struct.pack("<i", 4)
        guess = hmac.digest(b"guess" * 8, b"H" + nonce + rank, "sha256")
        for frames in (
            [b"H", nonce, rank, guess],
            [b"C", guess],
            [b"A", b"\xff" * 8, guess],
            [b"", b"x"],
            [b"H"],
        ):
            stranger.send_multipart(frames)
        assert writer._remote_writer is not None
        number, started = 0, time.monotonic()
        while writer._remote_writer._rejected < 5 or number < 5:
            writer.enqueue(number, timeout=5)
            assert reader.dequeue(timeout=5) == number
            number += 1
            assert time.monotonic() - started < 10
        assert not stranger.poll(100), "a stranger was answered"

        # A man in the middle: what reaches the reader is changed, repeated, or made up.
        (peer,) = writer._remote_writer._peers.values()
        end = writer._remote_writer._end
        real, sent = end.socket.send_multipart, []

        class Middle:
            def send_multipart(self, frames: list[Any], **kwargs: Any) -> None:
                if frames[1] == b"D":
                    sent.append(list(frames))
                    real([*frames[:4], b"not " + bytes(frames[4])])
                    if len(sent) > 1:
                        real(sent[-2])
                real(frames, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(socket_, name)

        socket_, end.socket = end.socket, Middle()
        for number in range(5):
            writer.enqueue({"number": number}, timeout=5)
            assert reader.dequeue(timeout=5) == {"number": number}
        with raises(TimeoutError):
            reader.dequeue(timeout=0.1)
        # A message that is missing is noticed.
        end.socket = socket_
        peer_route, sent_so_far = peer.route, writer._remote_writer._sent
        writer._remote_writer._sent += 1
        writer.enqueue("after a gap", timeout=5)
        with raises(MessageQueueClosed, f"messages {sent_so_far + 1} to {sent_so_far + 1} are missing"):
            reader.dequeue(timeout=5)
        assert peer_route
    finally:
        context.destroy(linger=0)
        reader.shutdown()
        writer.shutdown()


@scenario(limit_s=30)
def test_a_dead_peer_is_noticed() -> None:
    """A killed writer ends its reader's wait at once; a killed reader ends its writer's."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    peer = Peer(writer.export_handle(), 9, make_remote_writer)
    writer.wait_until_ready(20)
    reader = MessageQueue.create_from_handle(peer.receive(), 4)
    reader.wait_until_ready(20)
    assert reader.dequeue(timeout=5) == "hello"
    peer.kill()
    with raises(MessageQueueClosed, "rank 4", "closed the connection", within_s=1.0):
        reader.dequeue(timeout=10)
    with raises(MessageQueueClosed, "remote reader rank 9 is gone", within_s=2.0):
        for number in range(100):
            writer.enqueue(number, timeout=10)
    peer.end()
    reader.shutdown()
    writer.shutdown()


def make_remote_writer(reader: MessageQueue, conn: Any) -> None:
    answers = MessageQueue(1, 0, connect_ip="127.0.0.1")
    conn.send(answers.export_handle())
    answers.wait_until_ready(20)
    answers.enqueue("hello")
    time.sleep(1000)


def test_dropped_ends_do_not_block_the_collector() -> None:
    """L44: a ZMQ context that is collected before its sockets would wait for them for ever."""
    import gc

    gc.collect()  # what other tests have left is not counted
    descriptors = len(os.listdir("/proc/self/fd"))
    writer, reader = remote_pair()
    writer.enqueue("unread")
    loop: list[Any] = [writer, reader]
    loop.append(loop)
    del writer, reader, loop
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_address_that_is_not_ours_is_refused() -> None:
    """A2 has no second reading here: the port is the kernel's choice. The address must be this host's."""
    for ip in ("203.0.113.7", "not an address", "0.0.0.0.0"):
        with raises(ConfigError, ip, "connect_ip"):
            MessageQueue(1, 0, connect_ip=ip)
    assert mq_remote.host_ip()


# Process groups


def group_member(rank: int, world_size: int, path: str, nodes: int, results: Any) -> None:
    import torch.distributed as dist

    if nodes == 2:
        # G6: as if each half of the ranks were on a host of its own, whatever devices are visible.
        mq_groups.host_identity = lambda: (str(rank * 2 // world_size),)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    writer_rank = 1
    queue = MessageQueue.create_from_process_group(
        group, 4096, 4, writer_rank=writer_rank, connect_ip="127.0.0.1", name="group"
    )
    assert queue.is_writer == (rank == writer_rank)
    got = [queue.broadcast_object((n, b"x" * n * 5000) if rank == writer_rank else None) for n in range(10)]
    kinds = (queue.n_local_reader, queue.n_remote_reader) if rank == writer_rank else None

    own, handles = MessageQueue.create_from_process_group_single_reader(
        group, 4096, 4, connect_ip="127.0.0.1"
    )
    if rank == 0:
        ends = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
        own.enqueue(("from", 0))
        answers = []
        for end, handle in zip(ends, handles, strict=True):
            if handle.remote_subscribe_addr is not None:
                end.wait_until_ready(10)
            answers.append(end.dequeue(timeout=10))
        for end in ends:
            end.shutdown()
    else:
        assert handles == []
        own.wait_until_ready(10)
        own.enqueue(("from", rank))
        answers = None
    results.put((rank, [n for n, _ in got], kinds, answers, own.n_remote_reader))
    dist.barrier()
    own.shutdown()
    queue.shutdown()
    dist.destroy_process_group()


@pytest.mark.parametrize(("world_size", "nodes"), [(3, 1), (4, 2)])
def test_queues_of_a_process_group(world_size: int, nodes: int) -> None:
    import tempfile

    context = warm_processes.context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "rendezvous")
        processes = [
            context.Process(target=group_member, args=(rank, world_size, path, nodes, results))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers = sorted(results.get(timeout=80) for _ in processes)
        for process in processes:
            process.join(20)
            assert process.exitcode == 0
            process.close()
    results.close()
    results.join_thread()
    assert [answer[1] for answer in answers] == [list(range(10))] * world_size
    local = world_size // nodes - 1
    assert answers[1][2] == (local, world_size - 1 - local)
    assert answers[0][3] == [("from", rank) for rank in range(world_size)]
    remote = [int(nodes == 2 and rank >= world_size // 2) for rank in range(world_size)]
    assert [answer[4] for answer in answers] == remote


def test_host_identity_is_that_of_the_host() -> None:
    assert mq_groups.host_identity() == mq_groups.host_identity()
    assert all(isinstance(part, str) and part for part in mq_groups.host_identity())
