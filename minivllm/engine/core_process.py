"""How the EngineCore process ends, and what its client hears of it.

vLLM 0.25.1: vllm/v1/engine/core.py (EngineCoreProc.run_engine_core, EngineCoreProc._send_engine_dead), vllm/v1/engine/utils.py (SignalCallback)
Articles: part 2 §2.6.3, §2.6.4
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import msgspec
import zmq

from minivllm import tracing
from minivllm.engine import StartupMessage
from minivllm.exceptions import (
    ConfigError,
    ExecutorFailedError,
    RemoteError,
    WorkerConfigError,
    WorkerStartupError,
    WorkerStartupTimeout,
)
from minivllm.executor.leftovers import remove_leftovers

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
# Errors of a start-up that the client raises again as what they are; the most special ones first.
STARTUP_ERRORS = (WorkerConfigError, ConfigError, WorkerStartupTimeout, WorkerStartupError)
# The client sends it instead of SIGTERM when nobody waits for what the workers are at.
HURRY_SIGNAL = signal.SIGUSR1
_PARKING_S = 0.2


def make_socket(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """One end of the channel between client and EngineCore.

    Deviation from vLLM: one pair of sockets in both directions instead of two, as one client has one engine, and
    EngineCore binds. Their file is removed as soon as both are connected.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    # Neither side may ever block on a full queue: each could be waiting for the other.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # The client connects before EngineCore has bound.
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    return socket


class Ending:
    """Turns the first signal into SystemExit, and no later one: the clean-up must not be torn apart.

    Attributes:
        begun: the process is on its way out.
        hurried: no patience for busy workers.
    """

    def __init__(self) -> None:
        self.begun = False
        self.hurried = False
        self._parking = False
        self._parked = threading.Event()

    def on_signal(self, signum: int, frame: Any) -> None:
        if self._parking:
            self._parked.set()
            while True:
                time.sleep(60)
        if not self.begun:
            self.begun = True
            self.hurried = signum == HURRY_SIGNAL
            raise SystemExit(128 + signal.SIGTERM)

    def park_main_thread(self) -> None:
        """Keep the main thread from doing anything more, for as long as the process lives; from another thread.

        A call into C that it is in goes on, and is not waited for long.
        """
        self._parking = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self._parked.wait(_PARKING_S)


def leave(exit_code: int) -> NoReturn:
    """End the process without taking the interpreter apart, which takes long when a worker in here has loaded torch."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            # Nobody reads it any more.
            pass
    os._exit(exit_code)


def on_client_death(address: str, ending: Ending) -> None:
    """Ends this process when the client is gone; called in the thread that watches it.

    At once and without a clean-up by the main thread, which may be inside a step or a start-up for long: the kernel
    closes what this process holds, and the workers' own death pipes tell them.
    """
    try:
        # Before the main thread is stopped, which may be holding the recorder's lock.
        tracing.save_before_death()
        ending.park_main_thread()
        remove_socket_directory(address)
        remove_leftovers(os.getpid())
    finally:
        os._exit(1)


def make_socket_directory(address: str) -> None:
    """Make the private directory of an ipc:// address. Raises FileExistsError when somebody else has made it."""
    os.mkdir(os.path.dirname(address.removeprefix("ipc://")), mode=0o700)


def remove_socket_directory(address: str) -> None:
    """Remove the private directory of an ipc:// address; nothing happens when it is gone."""
    shutil.rmtree(os.path.dirname(address.removeprefix("ipc://")), ignore_errors=True)


def send_startup_message(socket: zmq.Socket[bytes], message: StartupMessage) -> None:
    socket.send(msgspec.msgpack.encode(message))


def say_goodbye(socket: zmq.Socket[bytes], ready: bool, error: BaseException) -> None:
    """Tell the client why this process ends; a client that is gone or no longer listens is no obstacle."""
    if isinstance(error, SystemExit):
        error = ExecutorFailedError("EngineCore was ended by SIGTERM")
    text = describe_failure(error)
    message = ENGINE_CORE_DEAD + text.encode()
    if not ready:
        kind = next((k.__name__ for k in STARTUP_ERRORS if isinstance(error, k)), "")
        message = msgspec.msgpack.encode(StartupMessage("failed", error=text, error_type=kind))
    try:
        socket.send(message, zmq.NOBLOCK)
    except zmq.ZMQError:
        pass


def describe_failure(error: BaseException) -> str:
    """The text that the user sees: errors of ours speak for themselves, any other needs its traceback."""
    if isinstance(error, (ConfigError, ExecutorFailedError, RemoteError)):
        return str(error)
    lines = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__qualname__}: {error}\n--- traceback in EngineCore ---\n{lines}"
