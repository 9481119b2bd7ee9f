"""Tries every order in which processes can run, step by step, on shared memory that may be late: a small model checker.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.1, §2.5.2

A process is a list of instructions on shared bytes (`Load`, `Store`, `Fence`, `Wait`, `Wake`, and a few that are local).
The explorer runs one instruction of one process at a time, in every possible order, and remembers the states it has seen.
It reports

* a process that gets what it must not get, for instance a reader a torn, old, or wrong message (`Expect`);
* a state in which nobody can go on although not everybody is done: a deadlock, or a wake-up that was lost. Sleepers of the
  model never look again by themselves, so a lost wake-up cannot hide behind the re-check that the real ones have.

Memory is one of three kinds. "sc": every store is visible at once. "tso" (x86): a process's stores become visible in order,
but late, so a load may overtake them. "pso": they also may overtake each other, as on ARM. A fence waits until they are
visible. (Loads that overtake loads are not modelled; the fences that prevent them stand in the same places.)

What it explores here is the ring's protocol, ring_model.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

MEMORIES: Final = ("sc", "tso", "pso")


class Load(NamedTuple):
    register: int
    address: str


class Store(NamedTuple):
    address: str
    value: int


class StoreNext(NamedTuple):
    """The value of a register plus one: not atomic with the load before it."""

    address: str
    register: int


class Fence(NamedTuple):
    pass


class Wait(NamedTuple):
    """Sleep until woken, if the word still has the register's value (the kernel compares and queues in one step)."""

    address: str
    register: int


class Wake(NamedTuple):
    """Wake everybody who sleeps on the word."""

    address: str


class Jump(NamedTuple):
    """Local: go to the label if the registers say so."""

    label: str
    condition: Callable[[tuple[int, ...]], bool]


class Expect(NamedTuple):
    """Local: a violation if the registers say otherwise."""

    condition: Callable[[tuple[int, ...]], bool]
    text: str


class Forget(NamedTuple):
    """Local: nothing in the registers is needed any more (states that differ only in that are the same)."""


class Label(NamedTuple):
    name: str


Instruction = Load | Store | StoreNext | Fence | Wait | Wake | Jump | Expect | Forget | Label


class Model(Protocol):
    """What is explored: programs by process name, and the shared memory that they start with."""

    def programs(self) -> dict[str, list[Instruction]]: ...

    def initial(self) -> dict[str, int]:
        """Value of each address."""
        ...


@dataclass
class Result:
    """Attributes:
    states: number of different states that were seen.
    violation: what went wrong, or "".
    steps: the shortest way there, one line a step.
    """

    states: int = 0
    violation: str = ""
    steps: list[str] = field(default_factory=list)


# A process: position, registers, stores that are not visible yet as (address, value), address it sleeps on or -1.
_Process = tuple[int, tuple[int, ...], tuple[tuple[int, int], ...], int]
_State = tuple[tuple[int, ...], tuple[_Process, ...]]
_REGISTERS: Final = (0, 0, 0, 0)


class Violation(Exception):
    pass


class Explorer:
    """Tries every order of the processes' steps."""

    def __init__(self, model: Model, memory: str = "sc") -> None:
        if memory not in MEMORIES:
            raise ValueError(f"memory {memory!r} is not one of {', '.join(MEMORIES)}")
        programs = model.programs()
        self.names = list(programs)
        initial = model.initial()
        self.addresses = list(initial)
        self._number = {address: number for number, address in enumerate(self.addresses)}
        self._memory = memory
        self._programs = [self._assemble(program) for program in programs.values()]
        self._first = tuple(initial.values())

    def _assemble(self, program: list[Instruction]) -> list[tuple[Any, ...]]:
        """Labels become positions and addresses become numbers."""
        positions: dict[str, int] = {}
        kept: list[Instruction] = []
        for item in program:
            if isinstance(item, Label):
                positions[item.name] = len(kept)
            elif not (isinstance(item, Fence) and self._memory == "sc"):
                kept.append(item)
        code: list[tuple[Any, ...]] = []
        for item in kept:
            match item:
                case Jump(label, condition):
                    code.append((Jump, positions[label], condition))
                case Load(register, address):
                    code.append((Load, self._number[address], register))
                case Expect(condition, text):
                    code.append((Expect, condition, text))
                case Fence() | Forget():
                    code.append((type(item),))
                case _:
                    code.append((type(item), self._number[item[0]], *item[1:]))
        return code

    def run(self, shortest: bool = True, limit: int = 5_000_000) -> Result:
        """Explore everything that can be reached, or stop at the first violation.

        Args:
            shortest: breadth first: the violation that is found is one with the fewest steps. Depth first finds one
                sooner.

        Raises:
            RuntimeError: more than `limit` states.
        """
        start: _State = (
            self._first,
            tuple(self._settle(i, 0, _REGISTERS, (), -1) for i in range(len(self.names))),
        )
        came_from: dict[_State, tuple[_State, int] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft() if shortest else queue.pop()
            stuck = True
            for index in range(len(self.names)):
                try:
                    successors = self._successors(state, index)
                except Violation as error:
                    return Result(
                        len(came_from), str(error), [*self._path(came_from, state), str(error.__cause__)]
                    )
                for following in successors:
                    stuck = False
                    if following not in came_from:
                        came_from[following] = (state, index)
                        queue.append(following)
            if stuck and not self._finished(state):
                sleepers = [
                    name for name, process in zip(self.names, state[1], strict=True) if process[3] >= 0
                ]
                return Result(
                    len(came_from),
                    f"nobody can go on, asleep: {', '.join(sleepers)}",
                    self._path(came_from, state),
                )
            if len(came_from) > limit:
                raise RuntimeError(f"more than {limit} states")
        return Result(len(came_from))

    def _finished(self, state: _State) -> bool:
        return all(process[0] == len(self._programs[i]) for i, process in enumerate(state[1]))

    def _settle(
        self,
        index: int,
        pc: int,
        registers: tuple[int, ...],
        buffer: tuple[tuple[int, int], ...],
        asleep_on: int,
    ) -> _Process:
        """Run what is local: it commutes with everything that others do."""
        program = self._programs[index]
        while pc < len(program):
            item = program[pc]
            kind = item[0]
            if kind is Jump:
                pc = item[1] if item[2](registers) else pc + 1
            elif kind is Forget:
                registers = _REGISTERS
                pc += 1
            elif kind is Expect:
                if not item[1](registers):
                    raise Violation(item[2].format(*registers))
                registers = _REGISTERS
                pc += 1
            else:
                break
        return (pc, registers, buffer, asleep_on)

    def _successors(self, state: _State, index: int) -> list[_State]:
        """The states that one step of one process leads to: none if it cannot go on, several if a store may become
        visible instead."""
        memory, processes = state
        pc, registers, buffer, asleep_on = processes[index]
        found: list[_State] = []
        for position in self._flushable(buffer):
            address, value = buffer[position]
            rest = buffer[:position] + buffer[position + 1 :]
            changed = _put(processes, index, (pc, registers, rest, asleep_on))
            found.append((_put(memory, address, value), changed))
        program = self._programs[index]
        if asleep_on >= 0 or pc == len(program):
            return found
        item = program[pc]
        kind = item[0]
        woken = -1
        if kind is Load:
            address = item[1]
            value = memory[address]
            if buffer:
                value = next((v for a, v in reversed(buffer) if a == address), value)
            registers = _put(registers, item[2], value)
        elif kind is Store or kind is StoreNext:
            value = item[2] if kind is Store else registers[item[2]] + 1
            if self._memory == "sc":
                memory = _put(memory, item[1], value)
            else:
                buffer = (*buffer, (item[1], value))
        elif buffer:
            return found  # a fence, and the kernel, wait until all stores are visible
        elif kind is Wait:
            if memory[item[1]] == registers[item[2]]:
                found.append((memory, _put(processes, index, (pc, (*registers[:2], 0, 0), buffer, item[1]))))
                return found
            registers = (*registers[:2], 0, 0)
        elif kind is Wake:
            woken = item[1]
        try:
            processes = _put(processes, index, self._settle(index, pc + 1, registers, buffer, -1))
        except Violation as error:
            raise Violation(str(error)) from Violation(self._text(state, index))
        if woken >= 0:
            processes = tuple(
                self._settle(other, process[0] + 1, process[1], process[2], -1)
                if process[3] == woken
                else process
                for other, process in enumerate(processes)
            )
        found.append((memory, processes))
        return found

    def _flushable(self, buffer: tuple[tuple[int, int], ...]) -> list[int]:
        if not buffer:
            return []
        if self._memory == "tso":
            return [0]
        addresses = [address for address, _ in buffer]
        return [position for position, address in enumerate(addresses) if address not in addresses[:position]]

    # Only for showing a violation.

    def _text(self, state: _State, index: int) -> str:
        """What the next step of a process is."""
        memory, processes = state
        pc, registers, buffer, _ = processes[index]
        item = self._programs[index][pc]
        name = self.addresses[item[1]] if len(item) > 1 and isinstance(item[1], int) else ""
        match item[0].__name__:
            case "Load":
                value = next((v for a, v in reversed(buffer) if a == item[1]), memory[item[1]])
                text = f"reads {name}: {value}"
            case "Store":
                text = f"{name} = {item[2]}"
            case "StoreNext":
                text = f"{name} = {registers[item[2]] + 1}"
            case "Wait":
                same = memory[item[1]] == registers[item[2]]
                text = f"sleeps on {name}" if same else f"does not sleep, {name} has changed"
            case "Wake":
                text = f"wakes all who sleep on {name}"
            case _:
                text = "fence"
        return f"{self.names[index]}: {text}"

    def _path(self, came_from: dict[_State, tuple[_State, int] | None], state: _State) -> list[str]:
        steps = []
        while (before := came_from[state]) is not None:
            previous, index = before
            old, new = previous[1][index], state[1][index]
            if old[0] == new[0] and len(new[2]) < len(old[2]) and old[3] == new[3]:
                changed = [
                    a for a, (was, now) in enumerate(zip(previous[0], state[0], strict=True)) if was != now
                ]
                what = ", ".join(f"{self.addresses[a]} = {state[0][a]}" for a in changed) or "a store"
                steps.append(f"{self.names[index]}: {what} becomes visible")
            else:
                steps.append(self._text(previous, index))
            state = previous
        return steps[::-1]


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
