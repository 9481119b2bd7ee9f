"""Readers of a message queue on other hosts: authenticated messages over TCP, never more of them than were asked for.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (the XPUB/SUB remote_socket of MessageQueue)
Articles: part 2 §2.5.3

Deviation from vLLM: there whoever reaches the port can make a worker unpickle what he sends, a slow reader loses
messages without an error, and a waiting remote reader cannot be woken. Here every message is authenticated before it is
unpickled, a reader gives credit by acknowledging, and every wait has a deadline and can be ended.

    reader                                  writer
    HELLO nonce, rank      ───────────────▶
                           ◀───────────────  WELCOME nonce          (both keyed with the handle's secret)
    CONFIRM                ───────────────▶                         (from here on keyed with the session's key)
                           ◀───────────────  READY                  when all have confirmed
                           ◀───────────────  DATA number, kind, context, frames …
    ACK number             ───────────────▶                         one more may come
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from minivllm.exceptions import ConfigError, MessageQueueClosed
from minivllm.tracing.deadlines import deadline_clock

logger = logging.getLogger("minivllm.distributed.shm_broadcast")

_HEADER: Final = struct.Struct("<QB25s")  # number, kind, trace context
_LONGEST_FROM_READER: Final = 256
_LOOK_S: Final = 0.05
_IDLE_LOOK_S: Final = 0.25
_HEARTBEAT_MS: Final = 2000
_HEARTBEAT_TIMEOUT_MS: Final = 10_000
_LINGER_MS: Final = 500


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _digest(frames: Sequence[Any]) -> bytes:
    """One hash over all frames and their borders, so that several readers do not cost several passes."""
    total = hashlib.sha256()
    for frame in frames:
        total.update(struct.pack("<Q", len(frame)))
        total.update(frame)
    return total.digest()


def host_ip() -> str:
    """The address of this host that the outside sees (no packet is sent to find it)."""
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((probe, 9))
            return str(sock.getsockname()[0])
    return "127.0.0.1"


class _Endpoint:
    """A socket, a pipe that ends its waits from any thread, and the context they live in.

    Closed by `close`, or when it is garbage, or at exit: the socket first, then the context. (Left to the collector in
    the other order, a ZMQ context waits for its sockets for ever.)
    """

    def __init__(self, kind: int) -> None:
        context = zmq.Context()
        self.socket: Any = context.socket(kind)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        # No limits of ZMQ's own: they drop, or block inside send. Credit bounds what is on its way.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(self._wake_read, zmq.POLLIN)
        self._sockets = [self.socket]
        self.close = weakref.finalize(
            self, _close, self._sockets, context, (self._wake_read, self._wake_write)
        )

    def watch_connection(self) -> Any:
        """A socket that becomes readable when the connection is lost."""
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sockets.append(monitor)
        self.poller.register(monitor, zmq.POLLIN)
        return monitor

    def wait(self, deadline: float | None, look_s: float) -> None:
        """Until something has come, `wake` was called, or it is time to look around."""
        if deadline is not None:
            look_s = min(look_s, max(0.0, deadline - deadline_clock()))
        events = dict(self.poller.poll(int(look_s * 1000) + 1))
        if self._wake_read in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 64)

    def receive(self) -> list[bytes] | None:
        try:
            frames: list[bytes] = self.socket.recv_multipart(zmq.DONTWAIT)
            return frames
        except zmq.Again:
            return None

    def wake(self) -> None:
        """From any thread, or a signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")


def _close(sockets: list[Any], context: Any, descriptors: tuple[int, int]) -> None:
    for sock in sockets:
        sock.close(linger=_LINGER_MS)
    context.term()
    for descriptor in descriptors:
        os.close(descriptor)


class _Peer:
    """A reader as its writer sees it."""

    __slots__ = ("acked", "confirmed", "rank", "route", "session")

    def __init__(self, route: bytes, rank: int, session: bytes) -> None:
        self.route = route
        self.rank = rank
        self.session = session
        self.confirmed = False
        self.acked = 0


class RemoteWriter:
    """The writer's side. Only one thread at a time may be inside (the queue's lock), except in `wake`.

    Invariants:
        1. The socket is bound to one address, which was given or is this host's, and to a port that the kernel chose.
        2. At most `window` messages are unacknowledged at any reader.
        3. Nothing that comes in is unpickled, and nothing counts that is not authenticated.
    """

    def __init__(self, connect_ip: str | None, n_reader: int, window: int) -> None:
        ip = connect_ip or host_ip()
        self.ipv6 = ":" in ip
        self.secret = secrets.token_bytes(32)
        self._n_reader = n_reader
        self._window = window
        self._peers: dict[bytes, _Peer] = {}
        self._sent = 0
        self._rejected = 0
        self._end = _Endpoint(zmq.ROUTER)
        sock = self._end.socket
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, _LONGEST_FROM_READER)
        if self.ipv6:
            sock.setsockopt(zmq.IPV6, 1)
        try:
            ipaddress.ip_address(ip.partition("%")[0])
            sock.bind(f"tcp://[{ip}]:0" if self.ipv6 else f"tcp://{ip}:0")
        except (zmq.ZMQError, ValueError) as error:
            self._end.close()
            raise ConfigError(
                f"cannot listen for remote readers on {ip!r}: {error}; connect_ip must be an address of this host"
            ) from None
        self.address: str = sock.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_until_attached(self, deadline: float | None, patience: Callable[[], None]) -> None:
        self._wait(lambda: len(self._confirmed()) == self._n_reader, deadline, patience)

    def set_ready(self) -> None:
        for peer in self._confirmed():
            self._send(peer, [b"R", _mac(peer.session, b"R")])

    def reserve(self, deadline: float | None, patience: Callable[[], None]) -> None:
        """Wait until every reader may be sent one more message."""
        self._wait(lambda: not self.late_ranks(), deadline, patience)

    def send(self, kind: int, context: bytes, frames: Sequence[Any]) -> None:
        """Send what was reserved. The frames are copied."""
        self._sent += 1
        header = _HEADER.pack(self._sent, kind, context)
        digest = _digest(frames)
        for peer in self._confirmed():
            self._send(peer, [b"D", header, _mac(peer.session, b"D", header, digest), *frames])

    def missing_readers(self) -> int:
        return self._n_reader - len(self._confirmed())

    def late_ranks(self) -> list[int]:
        """Ranks that have a whole window to acknowledge."""
        self._take_in()
        return [p.rank for p in self._confirmed() if self._sent - p.acked >= self._window]

    def wake(self) -> None:
        self._end.wake()

    def close(self) -> None:
        self._end.close()

    def _confirmed(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.confirmed]

    def _wait(self, ready: Callable[[], bool], deadline: float | None, patience: Callable[[], None]) -> None:
        while True:
            self._take_in()
            if ready():
                return
            patience()
            self._end.wait(deadline, _LOOK_S)
            for peer in self._confirmed():
                self._send(peer, [b"P"])  # fails when the reader's host has closed the connection

    def _send(self, peer: _Peer, frames: list[Any]) -> None:
        try:
            self._end.socket.send_multipart([peer.route, *frames], copy=True)
        except zmq.ZMQError as error:
            raise MessageQueueClosed(f"remote reader rank {peer.rank} is gone ({error})") from None

    def _take_in(self) -> None:
        while (frames := self._end.receive()) is not None:
            if not self._handle(frames):
                self._rejected += 1
                if self._rejected == 1:
                    logger.warning("%s: a message that is not authentic was dropped", self.address)

    def _handle(self, frames: list[bytes]) -> bool:
        route, *rest = frames
        peer = self._peers.get(route)
        match rest:
            case [b"H", nonce, rank, mac] if len(nonce) == 16 and len(rank) == 4:
                if not hmac.compare_digest(mac, _mac(self.secret, b"H", nonce, rank)):
                    return False
                number = struct.unpack("<i", rank)[0]
                if any(p.rank == number and p.confirmed for p in self._peers.values()):
                    return False
                mine = secrets.token_bytes(16)
                self._peers[route] = new = _Peer(route, number, _mac(self.secret, b"S", nonce, mine))
                self._send(new, [b"W", mine, _mac(self.secret, b"W", nonce, mine)])
                return True
            case [b"C", mac] if peer is not None and not peer.confirmed:
                if not hmac.compare_digest(mac, _mac(peer.session, b"C")):
                    return False
                peer.confirmed = True
                peer.acked = self._sent
                return True
            case [b"A", number, mac] if peer is not None and len(number) == 8:
                if not hmac.compare_digest(mac, _mac(peer.session, b"A", number)):
                    return False
                peer.acked = max(peer.acked, struct.unpack("<Q", number)[0])
                return True
        return False


class RemoteReader:
    """A reader's side. Only one thread at a time may be inside (the queue's lock), except in `wake`."""

    def __init__(self, address: str, ipv6: bool, secret: bytes, rank: int) -> None:
        self.rank = rank
        self._secret = secret
        self._session = b""
        self._received = 0
        self._ready = False
        self._gone = False
        self._end = _Endpoint(zmq.DEALER)
        sock = self._end.socket
        if ipv6:
            sock.setsockopt(zmq.IPV6, 1)
        self._monitor = self._end.watch_connection()
        sock.connect(address)
        self._nonce = secrets.token_bytes(16)
        packed = struct.pack("<i", rank)
        sock.send_multipart([b"H", self._nonce, packed, _mac(secret, b"H", self._nonce, packed)])

    def wait_until_ready(self, deadline: float | None, patience: Callable[[], None]) -> None:
        while not self._ready:
            frames = self._end.receive()
            if frames is None:
                self._wait(deadline, patience, _LOOK_S)
                continue
            match frames:
                case [b"W", nonce, mac] if not self._session:
                    if hmac.compare_digest(mac, _mac(self._secret, b"W", self._nonce, nonce)):
                        self._session = _mac(self._secret, b"S", self._nonce, nonce)
                        self._end.socket.send_multipart([b"C", _mac(self._session, b"C")])
                case [b"R", mac] if self._session:
                    self._ready = hmac.compare_digest(mac, _mac(self._session, b"R"))

    def receive(
        self, deadline: float | None, patience: Callable[[], None], idle: bool
    ) -> tuple[int, bytes, list[bytes]]:
        """Kind, trace context and frames of the next message, which is authentic and in order."""
        self.wait_until_ready(deadline, patience)
        look_s = _LOOK_S
        while True:
            frames = self._end.receive()
            if frames is None:
                self._wait(deadline, patience, look_s)
                look_s = min(look_s * 1.5, _IDLE_LOOK_S) if idle else _LOOK_S
                continue
            match frames:
                case [b"D", header, mac, *parts] if len(header) == _HEADER.size:
                    if not hmac.compare_digest(mac, _mac(self._session, b"D", header, _digest(parts))):
                        logger.warning(
                            "remote reader rank %d: a message that is not authentic was dropped", self.rank
                        )
                        continue
                    number, kind, context = _HEADER.unpack(header)
                    if number <= self._received:
                        continue  # a replay
                    if number != self._received + 1:
                        raise MessageQueueClosed(
                            f"remote reader rank {self.rank}: messages {self._received + 1} to {number - 1} are missing"
                        )
                    self._received = number
                    packed = struct.pack("<Q", number)
                    self._end.socket.send_multipart([b"A", packed, _mac(self._session, b"A", packed)])
                    return kind, context.rstrip(b"\0") and context, parts

    def _wait(self, deadline: float | None, patience: Callable[[], None], look_s: float) -> None:
        if self._gone:
            raise MessageQueueClosed(f"remote reader rank {self.rank}: the writer closed the connection")
        patience()
        self._end.wait(deadline, look_s)
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            # What has arrived before is read first: receive() comes before the next _wait().
            self._gone = self._gone or event["event"] == zmq.EVENT_DISCONNECTED

    def wake(self) -> None:
        self._end.wake()

    def close(self) -> None:
        self._end.close()
