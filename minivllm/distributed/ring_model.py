"""The ring's protocol once more, as a small state machine, for the explorer that tries every interleaving of it.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.1, §2.5.2

    python -m minivllm.distributed.ring_model                          explores the protocol as it is
    python -m minivllm.distributed.ring_model written-before-data      shows the shortest way in which a wrong one fails
    python -m minivllm.distributed.ring_model --spare --readers 1      messages that take the spare place where they may

explorer.py has the instructions that the programs consist of, and says what is found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from minivllm.distributed.explorer import (
    MEMORIES,
    Expect,
    Explorer,
    Fence,
    Forget,
    Instruction,
    Jump,
    Label,
    Load,
    Result,
    Store,
    StoreNext,
    Wait,
    Wake,
)

# Deliberately wrong protocols, by what is wrong. Each is found by the explorer; the tests say with which memory.
VARIANTS: Final = {
    "written-before-data": "the written flag is set before the message is in the slot",
    "flags-after-written": "the reader flags are cleared after the written flag is set, and start at 0 as in vLLM",
    "read-flag-before-data": "a reader sets its flag before it has taken the message out",
    "no-look-after-flag": "a sleeper does not look at the ring again after raising the sleep flag",
    "word-after-flag": "a sleeper reads the wake word after its last look at the ring",
    "bump-before-lowering": "a waker changes the wake word before it lowers the sleep flag",
    "no-bump": "a waker does not change the wake word",
    "counted-bump": "wakers count the wake word up, which is a load and a store, instead of storing values of their own",
    "one-reader-awaited": "the writer waits for one reader instead of all",
    "fence-as-in-vllm": "the fence stands between clearing the reader flags and setting the written flag",
    "progress-before-part": "the progress of a large message is stored before the part is there",
    "spare-not-awaited": "the writer takes the spare place before its last message has been read by all",
    "no-fence-in-notify": "no fence between lowering the sleep flag and changing the wake word",
    "no-fence-before-look": "no fence between the sleep flag and the sleeper's last look",
    "no-fence-before-sleep-flag": "no fence between the written or reader flag and the look at the sleep flag",
}


@dataclass(frozen=True)
class Ring:
    """What is explored: one writer that sends messages 1, 2, … to readers through slots.

    With `large` each message lies in a segment, is announced before it is written, and read part by part (mq_stream).
    With `spare` each lies in the one spare place if that may be taken, in its slot if not (ShmRingBuffer.take_spare).
    """

    readers: int = 2
    chunks: int = 2
    messages: int = 3
    variant: str = ""
    large: bool = False
    spare: bool = False

    def programs(self) -> dict[str, list[Instruction]]:
        readers = {f"reader {reader}": self.reader(reader) for reader in range(self.readers)}
        return {"writer": self.writer(), **readers}

    def writer(self) -> list[Instruction]:
        code: list[Instruction] = []
        for message in range(1, self.messages + 1):
            slot = (message - 1) % self.chunks
            written = f"slot {slot} written"
            flags = [f"slot {slot} read by {reader}" for reader in range(self.readers)]
            awaited = flags[:1] if self.variant == "one-reader-awaited" else flags

            # Free when all reader flags are set, or when the written flag is not.
            look: list[Instruction] = [Load(i, flag) for i, flag in enumerate(awaited)]
            look += [
                Jump(f"take {message}", _all_set(len(awaited))),
                Load(0, written),
                Jump(f"take {message}", lambda r: not r[0]),
            ]
            code += look + self._sleep("writer", look, str(message)) + [Label(f"take {message}"), Forget()]

            if self.spare:
                code += self._choose(message, slot)
                code += self._write(message, slot, flags, "spare")
                code += [Jump(f"written {message}", _always), Label(f"own {message}"), Forget()]
            code += self._write(message, slot, flags, f"slot {slot}")
            code += [Label(f"written {message}"), *self._wake("readers", 0, message)]
        return code

    def _choose(self, message: int, slot: int) -> list[Instruction]:
        """ShmRingBuffer.take_spare: falls through with the spare place taken, or jumps to "own".

        Whose slot it serves is the writer's own knowledge; it is kept in memory here because registers do not last.
        """
        code: list[Instruction] = [Store(f"slot {slot} written", 0), Load(2, "spare serves")]
        if self.variant != "spare-not-awaited":
            for last in range(self.chunks):
                if last != slot:
                    code.append(Jump(f"not in {last} {message}", lambda r, n=last + 1: r[2] != n))  # type: ignore[misc]
                    code += [Load(i, f"slot {last} read by {i}") for i in range(self.readers)]
                    code.append(Jump(f"spare {message}", _all_set(self.readers)))
                    code.append(Load(0, f"slot {last} written"))
                    code.append(Jump(f"own {message}", lambda r: bool(r[0])))
                    code.append(Label(f"not in {last} {message}"))
        return [*code, Label(f"spare {message}"), Forget(), Store("spare serves", slot + 1)]

    def _write(self, message: int, slot: int, flags: list[str], place: str) -> list[Instruction]:
        """A message, the word that says where it lies (if there are several places), and the flags that announce it."""
        written = f"slot {slot} written"
        word: list[Instruction] = []
        clear_written: list[Instruction] = [Store(written, 0)]
        if self.spare:
            clear_written = []  # it is already, see _choose
            word = [Store(f"slot {slot} in spare", int(place == "spare"))]
        data: list[Instruction] = [Store(f"{place} data {half}", message) for half in "ab"]
        clear_flags: list[Instruction] = [Store(flag, 0) for flag in flags]
        fence: list[Instruction] = [Fence()]
        publish: list[Instruction] = [Store(written, 1)]
        if self.large:
            code: list[Instruction] = [*clear_written, Store(f"slot {slot} progress", 0), *word]
            code += fence + clear_flags + publish
            code += self._wake("readers", 0, message, f"announced in {place}")
            for part, store in enumerate(data, 1):
                progress: list[Instruction] = [Store(f"slot {slot} progress", part)]
                early = self.variant == "progress-before-part"
                code += [*progress, *fence, store] if early else [store, *fence, *progress]
            return code
        data += word
        if self.variant == "written-before-data":
            return clear_written + fence + clear_flags + publish + data
        if self.variant == "flags-after-written":
            return clear_written + data + fence + publish + fence + clear_flags
        if self.variant == "fence-as-in-vllm":
            return clear_written + data + clear_flags + fence + publish
        return clear_written + data + fence + clear_flags + publish

    def reader(self, reader: int) -> list[Instruction]:
        code: list[Instruction] = []
        for message in range(1, self.messages + 1):
            slot = (message - 1) % self.chunks
            mine = f"slot {slot} read by {reader}"
            look: list[Instruction] = [
                Load(0, mine),
                Jump(f"not yet {message}", lambda r: bool(r[0])),
                Load(0, f"slot {slot} written"),
                Jump(f"take {message}", lambda r: bool(r[0])),
                Label(f"not yet {message}"),
            ]
            again = [
                item._replace(label=f"still not {message}")
                if isinstance(item, Jump) and item.label.startswith("not")
                else Label(f"still not {message}")
                if isinstance(item, Label)
                else item
                for item in look
            ]
            code += look + self._sleep("readers", again, str(message)) + [Label(f"take {message}"), Forget()]
            take: list[Instruction] = []
            for part, half in enumerate("ab", 1):
                if self.large:
                    name = f"{message}{half}"
                    progress: list[Instruction] = [
                        Load(2, f"slot {slot} progress"),
                        Jump(f"take {name}", _at_least(part)),
                    ]
                    take += (
                        progress + self._sleep("readers", progress, name, keep=True) + [Label(f"take {name}")]
                    )
                own = Load(part - 1, f"slot {slot} data {half}")
                if self.spare:
                    name = f"{message}{half}"
                    take += [
                        Load(2, f"slot {slot} in spare"),
                        Jump(f"in spare {name}", lambda r: bool(r[2])),
                        own,
                        Jump(f"got {name}", _always),
                        Label(f"in spare {name}"),
                        Load(part - 1, f"spare data {half}"),
                        Label(f"got {name}"),
                    ]
                else:
                    take.append(own)
            take += [
                Expect(
                    lambda r, m=message: r[0] == r[1] == m,  # type: ignore[misc]
                    f"reader {reader} expects message {message} and gets halves {{0}} and {{1}}",
                ),
            ]
            release: list[Instruction] = [Fence(), Store(mine, 1)]
            if self.variant == "read-flag-before-data":
                take, release = release, take
            code += take + release
            code += self._wake("writer", 1 + reader, message)
        return code

    def _sleep(self, who: str, look: list[Instruction], name: str, keep: bool = False) -> list[Instruction]:
        """SpinCondition._sleep: falls through when woken or when the wake word has changed; loops to its start."""
        start: list[Instruction] = [Label(f"sleep {name}")]
        if not keep:
            start.append(Forget())
        word: list[Instruction] = [Load(3, f"{who} word")]
        flag: list[Instruction] = [Store(f"{who} asleep", 1)]
        fence: list[Instruction] = [Fence()]
        wait: list[Instruction] = [
            Wait(f"{who} word", 3),
            Jump(f"sleep {name}", _always),
        ]
        if self.variant == "no-fence-before-look":
            fence = []
        if self.variant == "no-look-after-flag":
            # The look that found nothing was before the flag; look again only after a sleep.
            return [*start, *word, *look, *flag, *fence, *wait]
        if self.variant == "word-after-flag":
            return [*start, *flag, *fence, *look, *word, *wait]
        return [*start, *word, *flag, *fence, *look, *wait]

    def _wake(self, who: str, waker: int, message: int, label: str = "done") -> list[Instruction]:
        """The hot path's look at the sleep flag, and SpinCondition.notify."""
        value = 2 * message + (label == "done")  # no two of a waker's values are the same
        label = f"{label} {message}"
        fence: list[Instruction] = [] if self.variant == "no-fence-before-sleep-flag" else [Fence()]
        lower: list[Instruction] = [Store(f"{who} asleep", 0)]
        bump: list[Instruction] = [Store(f"{who} word", value * (1 + self.readers) + waker)]
        if self.variant == "no-bump":
            bump = []
        if self.variant == "counted-bump":
            bump = [Load(0, f"{who} word"), StoreNext(f"{who} word", 0)]
        between: list[Instruction] = [] if self.variant == "no-fence-in-notify" else [Fence()]
        change = bump + between + lower if self.variant == "bump-before-lowering" else lower + between + bump
        return [
            *fence,
            Load(0, f"{who} asleep"),
            Jump(label, lambda r: not r[0]),
            *change,
            Wake(f"{who} word"),
            Label(label),
            Forget(),
        ]

    def initial(self) -> dict[str, int]:
        fresh = 0 if self.variant == "flags-after-written" else 1
        memory = {f"{who} {what}": 0 for who in ("readers", "writer") for what in ("word", "asleep")}
        for slot in range(self.chunks):
            memory |= {f"slot {slot} written": 0, f"slot {slot} data a": 0, f"slot {slot} data b": 0}
            memory |= {f"slot {slot} read by {reader}": fresh for reader in range(self.readers)}
            if self.large:
                memory[f"slot {slot} progress"] = 0
            if self.spare:
                memory[f"slot {slot} in spare"] = 0
        if self.spare:
            memory |= {"spare serves": 0, "spare data a": 0, "spare data b": 0}
        return memory


def _always(_: tuple[int, ...]) -> bool:
    return True


def _all_set(count: int) -> Callable[[tuple[int, ...]], bool]:
    return lambda registers: all(registers[:count])


def _at_least(part: int) -> Callable[[tuple[int, ...]], bool]:
    return lambda registers: registers[2] >= part


def explore(ring: Ring, memory: str = "sc", shortest: bool = True) -> Result:
    return Explorer(ring, memory).run(shortest)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Explore every interleaving of the ring's protocol.")
    parser.add_argument(
        "variant", nargs="?", default="", choices=["", *VARIANTS], help="a deliberately wrong one"
    )
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--messages", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="messages that are read while they are written")
    parser.add_argument(
        "--spare", action="store_true", help="one more place, which a message takes if it may"
    )
    parser.add_argument("--memory", choices=MEMORIES, default="sc")
    options = parser.parse_args(arguments)
    ring = Ring(
        options.readers, options.chunks, options.messages, options.variant, options.large, options.spare
    )
    result = explore(ring, options.memory)
    counts = (options.readers, "reader"), (options.chunks, "slot"), (options.messages, "message")
    setting = ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts)
    print(f"{setting}: {result.states} states")
    if not result.violation:
        print("no message is lost or torn, nobody waits for ever")
        return 0
    for number, step in enumerate(result.steps, 1):
        print(f"{number:4} {step}")
    print(f"=> {result.violation}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
