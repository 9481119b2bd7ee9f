"""The controller of a live step-through: who stands before which step, and the letting go.

vLLM 0.25.1: none
Articles: part 2 §2.3.1
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm.stepper.source import Place, find_place, place_in_catalogue
from minivllm.timeline import theme
from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.gate import socket_address


@dataclass(frozen=True, slots=True)
class Halt:
    """A thread that stands before a step, or the step that it was last let into.

    Attributes:
        thread: its number in the operating system.
        around: the steps that are open around it, the outermost first.
        since: time.monotonic() of its arrival, or of its being let go.
    """

    thread: int
    thread_name: str
    span: str
    around: tuple[str, ...]
    place: Place
    attributes: dict[str, str]
    since: float


@dataclass(eq=False, slots=True)
class Peer:
    """One process of the run.

    Attributes:
        halts: threads that stand, by number, in the order in which they arrived.
        inside: the step that a thread was let into last, by thread.
        entered: how often it was let into which step of which group.
        groups: the ranks of its process groups, as it has said.
        free: it runs on and stops nowhere.
        ended: "" while it lives, "ended" when it has said goodbye, "died" when it has not.
    """

    connection: socket.socket
    role: str = ""
    rank: int | None = None
    pid: int = 0
    halts: dict[int, Halt] = field(default_factory=dict)
    inside: dict[int, Halt] = field(default_factory=dict)
    entered: Counter[tuple[str, str]] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    free: bool = False
    ended: str = ""
    received: bytes = b""
    said_goodbye: bool = False

    @property
    def name(self) -> str:
        if self.role == "worker":
            return f"rank {self.rank}"
        return "EngineCore" if self.role == "engine_core" else "client"

    @property
    def slot(self) -> int:
        """Number of its colour."""
        if self.role == "worker":
            return theme.FIRST_WORKER_SLOT + (self.rank or 0)
        return theme.ENGINE_CORE_SLOT if self.role == "engine_core" else theme.CLIENT_SLOT

    @property
    def first_halt(self) -> Halt | None:
        return next(iter(self.halts.values()), None)

    @property
    def at(self) -> Halt | None:
        """Where it stands, else the step that it entered last."""
        return self.first_halt or max(self.inside.values(), key=lambda halt: halt.since, default=None)

    def answers_to(self, who: str) -> bool:
        """who: "client", "engine", "rankN" or "all"."""
        names = {"engine_core": "engine", "worker": f"rank{self.rank}"}
        return who in ("all", names.get(self.role, self.role))


class Server:
    """Where all processes of one run meet their controller. For one thread.

    Attributes:
        address: what the processes are told.
        peers: in the order in which they came.
        arrivals: halts so far.
    """

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.arrivals = 0
        self._all_free = False
        self._held = False
        self._directory = ""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"minivllm-live-{os.getpid()}-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            # An abstract address leaves nothing behind, whatever ends this process.
            self.address = f"@{name}"
        else:
            self._directory = tempfile.mkdtemp(prefix="minivllm-live-")
            self.address = f"{self._directory}/socket"
        self._listener.bind(socket_address(self.address))
        self._listener.listen(64)

    def close(self) -> None:
        """Let everybody go on, and be gone."""
        for peer in self.peers:
            peer.connection.close()
        self._listener.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- questions

    def halted(self) -> list[tuple[Peer, Halt]]:
        """Everybody who stands, the longest first."""
        found = [(peer, halt) for peer in self.peers for halt in peer.halts.values()]
        return sorted(found, key=lambda entry: entry[1].since)

    def find(self, who: str) -> list[Peer]:
        """Processes by the name that failpoints have for them; "all" for all that live."""
        return [peer for peer in self.in_order if peer.answers_to(who) and not peer.ended]

    @property
    def in_order(self) -> list[Peer]:
        """Those who have said who they are: client, EngineCore, workers by rank."""
        known = [peer for peer in self.peers if peer.role]
        return sorted(known, key=lambda peer: (peer.slot, self.peers.index(peer)))

    @property
    def workers(self) -> dict[int, Peer]:
        """By rank; the latest of a rank."""
        return {peer.rank or 0: peer for peer in self.peers if peer.role == "worker"}

    # --- events

    def wait(self, timeout_s: float, also: Iterable[int] = ()) -> list[int]:
        """Take what the processes say; returns which of the descriptors in `also` are readable."""
        connections = {peer.connection.fileno(): peer for peer in self.peers if not peer.ended}
        extra = list(also)
        listener = self._listener.fileno()
        ready, _, _ = select.select([listener, *connections, *extra], [], [], timeout_s)
        for item in ready:
            if item == listener:
                self._accept()
            elif item in connections:
                self._receive(connections[item])
        self._say_whether_held()
        return [item for item in extra if item in ready]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        peer = Peer(connection, free=self._all_free)
        self.peers.append(peer)
        if self._all_free:
            self._send(peer, {"free": True})
        if self._held:
            self._send(peer, {"held": True})

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            peer.ended = "ended" if peer.said_goodbye else "died"
            peer.halts.clear()
            peer.connection.close()
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            self._take(peer, json.loads(line))

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        if "hello" in message:
            hello = message["hello"]
            peer.pid, peer.role, peer.rank = hello["pid"], hello["role"], hello["rank"]
        elif "at" in message:
            halt = _halt(message["at"])
            if halt.span == "dist.new_group":
                ranks = halt.attributes.get("ranks", "").strip("[]").split(",")
                peer.groups[halt.attributes.get("group", "")] = tuple(int(r) for r in ranks if r.strip())
            if message["passing"]:
                self._enter(peer, halt)
            else:
                peer.halts[halt.thread] = halt
                self.arrivals += 1
        elif "left" in message:
            peer.halts.pop(message["left"], None)
        elif "bye" in message:
            peer.said_goodbye = True

    def _enter(self, peer: Peer, halt: Halt) -> None:
        peer.inside[halt.thread] = halt
        peer.entered[halt.span, halt.attributes.get("group", "")] += 1

    # --- letting go

    def go(self, peer: Peer, halt: Halt) -> None:
        """One step."""
        if peer.halts.pop(halt.thread, None) is not None:
            self._let_into(peer, halt)
            self._send(peer, {"go": halt.thread})
        self._say_whether_held()

    def set_free(self, peer: Peer, free: bool) -> None:
        """Have one process run on, or stop again at its next step."""
        peer.free = free
        if free:
            for halt in peer.halts.values():
                self._let_into(peer, halt)
            peer.halts.clear()
        self._send(peer, {"free": free})
        self._say_whether_held()

    def set_all_free(self, free: bool) -> None:
        """The same for all, also for those that are yet to come."""
        self._all_free = free
        for peer in self.peers:
            if not peer.ended:
                self.set_free(peer, free)

    def _let_into(self, peer: Peer, halt: Halt) -> None:
        self._enter(
            peer,
            Halt(
                halt.thread,
                halt.thread_name,
                halt.span,
                halt.around,
                halt.place,
                halt.attributes,
                time.monotonic(),
            ),
        )

    def _say_whether_held(self) -> None:
        held = any(peer.halts for peer in self.peers)
        if held != self._held:
            self._held = held
            for peer in self.peers:
                if not peer.ended:
                    self._send(peer, {"held": held})

    @staticmethod
    def _send(peer: Peer, message: dict[str, Any]) -> None:
        try:
            peer.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # its end is in the socket already, and read next


def _halt(said: dict[str, Any]) -> Halt:
    path, line, function = said["place"]
    known = said["span"] in SPANS
    if path or not known:
        place = find_place(said["span"], path, line, function)
    else:
        place = place_in_catalogue(said["span"])
    return Halt(
        said["thread"],
        said["thread_name"],
        said["span"],
        tuple(said["around"]),
        place,
        said["attributes"],
        time.monotonic(),
    )
