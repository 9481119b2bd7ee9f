"""A live step-through without a terminal: commands from a text, plain lines as the answer.

vLLM 0.25.1: none
Articles: –

    until dist.rendezvous@rank0; step rank0; show; run
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.exceptions import ConfigError
from minivllm.live_step.bell import Bell
from minivllm.live_step.picture import picture
from minivllm.live_step.processes import Processes
from minivllm.live_step.server import Halt, Peer, Server
from minivllm.live_step.words import status
from minivllm.tracing.gate import STEPS

SYNTAX = (
    "step [WHO] [TIMES], run [WHO], stop [WHO], until SPAN[@WHO], show, quit; WHO: client, engine, rankN, all"
)
_WHO = r"(?:client|engine|rank\d+|all)"
_COMMAND = re.compile(
    rf"(?P<step>step)(?:\s+(?P<step_who>{_WHO}))?(?:\s+(?P<times>\d+))?"
    rf"|(?P<verb>run|stop)(?:\s+(?P<who>{_WHO}))?"
    rf"|until\s+(?P<span>[a-z_.]+)(?:@(?P<until_who>{_WHO}))?"
    r"|(?P<plain>show|quit|keys)"
)
# A process that does not come to its next step within this time is taken to be working or waiting.
_SETTLED_S = 0.4
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Command:
    """verb: "step", "run", "stop", "until", "show", "quit" or "keys"; what the verb does not have is empty."""

    text: str
    verb: str
    who: str = ""
    times: int = 1
    span: str = ""


def parse(text: str) -> list[Command]:
    """Commands separated by semicolons or lines.

    Raises:
        ConfigError: a command of another form, or a step at which nobody stops.
    """
    commands = []
    for part in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        match = _COMMAND.fullmatch(part)
        if match is None:
            raise ConfigError(f"live step: {part!r} is no command; there are {SYNTAX}")
        if match["span"] and match["span"] not in STEPS:
            raise ConfigError(
                f"live step: {part!r}: nobody stops at {match['span']!r} (`minivllm spans` lists the steps; it "
                "has to be one of level lifecycle)"
            )
        verb = match["step"] or match["verb"] or match["plain"] or "until"
        who = match["step_who"] or match["who"] or match["until_who"] or ("" if verb == "step" else "all")
        commands.append(Command(part, verb, who, int(match["times"] or 1), match["span"] or ""))
    if any(command.verb == "keys" for command in commands[:-1]):
        raise ConfigError("live step: `keys` goes on at the terminal, so it can only be the last command")
    if not commands:
        raise ConfigError(f"live step: no command; there are {SYNTAX}")
    return commands


def check_processes(commands: Sequence[Command], processes: Processes) -> None:
    """Raises ConfigError: a command about a process that the run will not have, or a step that it never takes."""
    for command in commands:
        lack = processes.lack(command.who)
        if command.verb == "until":
            lack = lack or processes.lack_of_step(command.span, command.who)
        if lack:
            raise ConfigError(f"live step: {command.text!r}: {lack}")


class Player:
    """Carries commands out, one after another."""

    def __init__(
        self,
        server: Server,
        bell: Bell,
        commands: list[Command],
        write: Callable[[str], None],
        quit_run: Callable[[], None],
    ) -> None:
        self.server = server
        self._bell = bell
        self._commands = commands
        self._write = write
        self._quit_run = quit_run
        self._verbs: dict[str, Callable[[Command], None]] = {
            "step": self._step,
            "run": lambda command: self._set_free(command, True),
            "stop": lambda command: self._set_free(command, False),
            "until": self._until,
            "show": self._show,
            "quit": lambda command: self._quit_run(),
            "keys": lambda command: None,  # whoever runs the commands goes on from here
        }

    def run(self) -> None:
        """All commands; whoever stands after the last one is let go by the caller."""
        # Somebody has to have come before anybody can be let go.
        self._wait_until(lambda: bool(self.server.halted()))
        for command in self._commands:
            if self._bell.released:
                return
            self._write(f"> {command.text}")
            self._verbs[command.verb](command)

    # --- commands

    def _step(self, command: Command) -> None:
        for _ in range(command.times):
            standing = self.server.halted()
            chosen = [entry for entry in standing if not command.who or entry[0].answers_to(command.who)]
            if not command.who:
                chosen = chosen[:1]
            if not chosen:
                self._say_where(self.server.find(command.who or "all"))
                return
            for peer, halt in chosen:
                self.server.go(peer, halt)
            self._settle([peer for peer, _ in chosen])
            self._say_where([peer for peer, _ in chosen])

    def _set_free(self, command: Command, free: bool) -> None:
        if command.who == "all":
            self.server.set_all_free(free)
        else:
            for peer in self.server.find(command.who):
                self.server.set_free(peer, free)

    def _until(self, command: Command) -> None:
        def found() -> list[tuple[Peer, Halt]]:
            return [
                (peer, halt)
                for peer, halt in self.server.halted()
                if halt.span == command.span and peer.answers_to(command.who)
            ]

        def arrived() -> bool:
            if found():
                return True
            # Nobody passes this step before the one that is meant: else a rendezvous could be over when it comes.
            for peer, halt in self.server.halted():
                if halt.span != command.span or self._is_behind(peer, halt, command.who):
                    self.server.go(peer, halt)
            return False

        if self._wait_until(arrived):
            # The others come to their next steps.
            self._settle(self.server.find("all"))
            self._say_where(self.server.in_order)
        else:
            self._write(f"the run has ended without coming to {command.span}")

    def _is_behind(self, peer: Peer, halt: Halt, who: str) -> bool:
        """Whether all who are meant have been in this step already, and may be waiting there for this one."""
        key = halt.span, halt.attributes.get("group", "")
        meant = self.server.find(who)
        return bool(meant) and all(other.entered[key] > peer.entered[key] for other in meant)

    def _show(self, command: Command) -> None:
        standing = self.server.halted()
        marked = standing[0][0] if standing else None
        for line in picture(self.server, marked, "utf-8", 88, 28, keys=False):
            self._write(line.plain.rstrip())

    # --- waiting and telling

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._bell.released:
                return False
            self._wait(1.0)
        return True

    def _wait(self, timeout_s: float) -> None:
        self.server.wait(timeout_s, [self._bell.descriptor])
        self._bell.hush()

    def _settle(self, peers: list[Peer]) -> None:
        """Until all of them stand, or nothing has happened for a moment."""
        quiet_since = time.monotonic()
        before = self.server.arrivals
        while not self._bell.released and time.monotonic() - quiet_since < _SETTLED_S:
            if all(peer.halts or peer.ended for peer in peers):
                return
            self._wait(_POLL_S)
            if self.server.arrivals != before:
                before, quiet_since = self.server.arrivals, time.monotonic()

    def _say_where(self, peers: list[Peer]) -> None:
        for peer in peers:
            now = status(self.server, peer)
            self._write(f"{peer.name:<11} {'; '.join(filter(None, (now.text, now.note)))}")
