"""Live stepping: this process stops before each lifecycle step until the reader's controller lets it go on.

vLLM 0.25.1: none
Articles: part 2 §2.3.1, §2.6

A process has one socket to the controller, with a JSON object per line. It says `hello` (who it is), `at` (a thread
stands before a step, or passes it while the process runs freely), `left` (a signal took the thread away) and `bye`;
it is told `go` (one thread), `free` (do not stop, or stop again) and `held` (whether anybody stands still). When the
controller is gone everybody goes on: what then ends the processes are the same pipes as ever.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from minivllm.tracing.catalogue import SPANS
from minivllm.tracing.place import local
from minivllm.tracing.process import ROLES, identity
from minivllm.tracing.spec import CLIENT, LIFECYCLE, SpanSpec

if TYPE_CHECKING:
    from minivllm.tracing.spans import Span

logger = logging.getLogger(__name__)
THREAD_NAME: Final = "minivllm-live-step"
# A signal that comes just before a wait begins does not interrupt it; its handler runs when Python is next at work.
_LOOK_FOR_SIGNALS_S: Final = 0.25
# A process can say that it has been started only when that is over.
STEPS: Final = frozenset(
    name for name, entry in SPANS.items() if entry.level == LIFECYCLE and name != "worker.bootstrap"
)


class Gate:
    """The process's side.

    Attributes:
        address: where the controller listens; "@name" is an abstract address of Linux.
    """

    def __init__(self, address: str) -> None:
        """Raises OSError: nobody listens there."""
        self.address = address
        self._lock = threading.Lock()
        self._turns: dict[int, threading.Event] = {}
        self._free = False
        # Replaced as a whole, so that whoever reads the clock meanwhile counts nothing twice: seconds until now, and
        # since when somebody has been standing again (0: nobody is).
        self._stood: tuple[float, float] = 0.0, 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(socket_address(address))
        except OSError:
            self._socket.close()
            raise
        # The controller's own process has its first stop before anybody has said who it is.
        role = identity.role if identity.role in ROLES else CLIENT
        self._send({"hello": {"pid": identity.pid, "role": role, "rank": identity.rank}})
        threading.Thread(target=self._listen, name=THREAD_NAME, daemon=True).start()

    def stop(self, entry: SpanSpec, item: Span) -> None:
        """Stand still before a step until the controller says go."""
        thread = local.thread
        turn = threading.Event()
        with self._lock:
            if self._free:
                turn.set()
            else:
                self._turns[thread.native_id] = turn
        self._send({"at": self._describe(entry, item), "passing": turn.is_set()})
        if turn.is_set():
            return
        started = time.monotonic()
        try:
            while not turn.wait(_LOOK_FOR_SIGNALS_S):
                pass
        except BaseException:
            # A signal handler wants this thread elsewhere.
            self._send({"left": thread.native_id})
            raise
        finally:
            with self._lock:
                self._turns.pop(thread.native_id, None)
        item.event("live_step", stopped_s=round(time.monotonic() - started, 3))

    def _describe(self, entry: SpanSpec, item: Span) -> dict[str, Any]:
        thread, place = local.thread, item.place
        around = []
        outer = thread.current if thread.current is not item else item.outer
        while outer is not None:
            around.append(outer.spec.name)
            outer = outer.outer
        said = (item.attributes or {}) if item.spec is entry else {}
        return {
            "thread": thread.native_id,
            "thread_name": thread.name,
            "span": entry.name,
            "around": around[::-1],
            "place": [place.path, place.line, place.function] if item.site is not None else ["", 0, ""],
            "attributes": {key: str(value) for key, value in said.items()},
        }

    def clock(self, now: float) -> float:
        """time.monotonic() without the seconds in which some process of the run has been standing.

        While one is, it is the same number each time: a wait whose limit is 0 would otherwise look for the end of its
        patience again and again.
        """
        stood_s, since = self._stood
        return (since or now) - stood_s

    def close(self) -> None:
        """Say that this process ends in order."""
        self._send({"bye": True})

    def close_copy(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._set_free(True)

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError):
            pass
        self._hold(False)
        self._set_free(True)

    def _take(self, message: dict[str, Any]) -> None:
        if "go" in message:
            with self._lock:
                turn = self._turns.get(message["go"])
            if turn is not None:
                turn.set()
        elif "free" in message:
            self._set_free(message["free"])
        elif "held" in message:
            self._hold(message["held"])

    def _set_free(self, free: bool) -> None:
        with self._lock:
            self._free = free
            for turn in self._turns.values() if free else ():
                turn.set()

    def _hold(self, held: bool) -> None:
        now = time.monotonic()
        stood_s, since = self._stood
        if held and not since:
            self._stood = stood_s, now
        elif not held and since:
            self._stood = stood_s + now - since, 0.0


def socket_address(address: str) -> str:
    """The address as the socket module wants it."""
    return "\0" + address[1:] if address.startswith("@") else address


def open_gate(address: str) -> Gate | None:
    """Join the live step-through at this address; None when there is none any more."""
    try:
        return Gate(address)
    except OSError as error:
        logger.warning("nobody steps through this run (%s): %s", address, error)
        return None
