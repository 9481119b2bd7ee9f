"""Stepping through the running system: every process stops before each lifecycle step until it is let go.

vLLM 0.25.1: none
Articles: part 1 §2, §5, part 2 §2.3.1

    with LLM(tensor_parallel_size=2, live_step=True) as llm: ...
    with LLM(tensor_parallel_size=2, live_step="until dist.rendezvous; show; run") as llm: ...

The controller is a thread of the client. Whatever ends the client ends the controller, too; then all gates are open,
and the processes come to the same ends as in a run without it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from minivllm import tracing
from minivllm.exceptions import ConfigError
from minivllm.live_step.bell import Bell
from minivllm.live_step.processes import Processes
from minivllm.live_step.script import Player, check_processes, parse
from minivllm.live_step.server import Server

if TYPE_CHECKING:
    from minivllm.config import VllmConfig

__all__ = ["LiveStep", "check"]

_WITHOUT_A_TERMINAL = (
    'give commands instead: --live-step "until dist.rendezvous; show; run", or live_step="…" in Python'
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check(live_step: bool | str, vllm_config: VllmConfig | None = None) -> None:
    """Refuse what cannot work before any process is started.

    Args:
        live_step: True for the terminal, else a script of commands.
        vllm_config: says which processes the run will have; None: not known yet.

    Raises:
        ConfigError: no terminal, a wrong script, one about a process that the run will not have, or not the main thread.
    """
    if isinstance(live_step, str) and vllm_config is not None:
        check_processes(parse(live_step), Processes.of(vllm_config))
    if not _wants_terminal(live_step):
        return
    from minivllm.stepper.terminal import check_terminal

    check_terminal(_WITHOUT_A_TERMINAL)
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("live_step=True needs the main thread, which gets the terminal's signals")


def _wants_terminal(live_step: bool | str) -> bool:
    return not isinstance(live_step, str) or parse(live_step)[-1].verb == "keys"


class LiveStep:
    """The controller of one run, from before its first step to after its last."""

    def __init__(self, live_step: bool | str, vllm_config: VllmConfig) -> None:
        """Raises ConfigError: see check()."""
        check(live_step, vllm_config)
        self._processes = Processes.of(vllm_config)
        self._ending = False
        self._server = Server()
        self._bell = Bell()
        self._stack = ExitStack()
        bodies: list[Callable[[], None]] = []
        if isinstance(live_step, str):
            player = Player(self._server, self._bell, parse(live_step), _print_line, self._interrupt)
            bodies.append(player.run)
        if _wants_terminal(live_step):
            bodies.append(self._take_terminal())
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        self._thread = threading.Thread(target=self._run, args=(bodies,), name="minivllm-live", daemon=True)
        self._thread.start()
        tracing.step_live(self._server.address)

    def begin_end(self) -> None:
        """The run is being ended: from now on quitting lets everybody go and interrupts nobody."""
        self._ending = True

    def close(self) -> None:
        """Let everybody go, and give the terminal back. Idempotent."""
        self._bell.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        tracing.step_live("")
        self._stack.close()

    def _run(self, bodies: list[Callable[[], None]]) -> None:
        try:
            for body in bodies:
                body()
        except OSError:
            # The terminal is gone.
            self._interrupt()
        finally:
            self._server.set_all_free(True)
            while not self._bell.closed:
                self._server.wait(1.0, [self._bell.descriptor])
                self._bell.hush()
            self._server.close()

    def _interrupt(self) -> None:
        """End the run as Ctrl-C does; from the controller's thread."""
        if not self._ending:
            self._bell.release()
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            number = signal.SIGTERM if ignored else signal.SIGINT
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _take_terminal(self) -> Callable[[], None]:
        from minivllm.live_step.app import App
        from minivllm.live_step.output import KeptOutput
        from minivllm.stepper.app import make_console
        from minivllm.stepper.terminal import Terminal

        encoding, console = sys.stdout.encoding or "ascii", make_console()
        output = KeptOutput()
        self._stack.callback(output.restore)
        terminal = Terminal(output.terminal)
        self._stack.enter_context(terminal.open())
        return App(
            self._server,
            self._bell,
            terminal,
            console,
            encoding,
            output.last_line,
            self._interrupt,
            self._processes,
        ).run

    def _catch_signals(self) -> None:
        """Whatever a signal does to the client, nobody may be left standing before it."""
        before: dict[int, Any] = {}

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._bell.release()
            if self._ending and number == signal.SIGINT:
                return
            handler = before[number]
            if callable(handler):
                handler(number, frame)
            else:
                # The controller loses its terminal now, and would end the run as Ctrl-C does.
                self._ending = True
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._stack.close()
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        def restore() -> None:
            for number, handler in before.items():
                if signal.getsignal(number) is on_signal:
                    signal.signal(number, handler)

        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, on_signal)
        self._stack.callback(restore)


def _print_line(line: str) -> None:
    print(line, flush=True)
