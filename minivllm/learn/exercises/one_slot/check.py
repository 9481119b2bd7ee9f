"""One-slot: a writer that does not wait, and two readers of which one is slow.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

COMMANDS = ["load", "step 1", "step 2", "step 3", "step 4", "stop"]


def check_never_overwritten(module: Any) -> None:
    """A command that a reader has not taken yet is never overwritten."""
    channel = module.OneSlotChannel(kit.context, 2)
    sending = kit.Call(_send, channel, ["first", "second"])
    quick = kit.Call(_receive, channel, 0, 2)
    if sending.returns_within(0.4):
        late = kit.within(2, "receive(1)", channel.receive, 1)
        raise kit.Broken(
            f"two commands were sent, and reader 1 had taken none of them; when it came, it found {late!r}"
        )
    late = kit.within(2, "receive(1)", _receive, channel, 1, 2)
    sending.result(2, "send, with both readers there,")
    for rank, got in enumerate((quick.result(2, "receive(0)"), late)):
        if got != ["first", "second"]:
            raise kit.Broken(f"reader {rank} got {got} instead of ['first', 'second']")


def check_every_command_arrives(module: Any) -> None:
    """Every reader gets every command, once, in the order in which they were sent."""
    channel = module.OneSlotChannel(kit.context, 2)
    pipes = [kit.context.Pipe(duplex=False) for _ in range(2)]
    readers = [
        kit.start(_read, channel, rank, pause, pipes[rank][1]) for rank, pause in enumerate((0.0, 0.03))
    ]
    try:
        for ours, _ in pipes:
            if not ours.poll(10 * kit.slack()):
                raise kit.Broken("a reader did not start")
            ours.recv()
        kit.within(5, "sending six commands", _send, channel, COMMANDS)
        for rank, process in enumerate(readers):
            got = []
            while pipes[rank][0].poll(2 * kit.slack()):
                got.append(pipes[rank][0].recv())
                if got[-1] == "stop":
                    break
            if got != COMMANDS:
                raise kit.Broken(f"reader {rank} got {got} instead of {COMMANDS}")
            kit.must_end(process, 5, f"reader {rank}")
    finally:
        kit.end(*readers)


def _send(channel: Any, commands: list[str]) -> None:
    for command in commands:
        channel.send(command)


def _receive(channel: Any, rank: int, count: int) -> list[str]:
    return [channel.receive(rank) for _ in range(count)]


def _read(channel: Any, rank: int, pause_s: float, result: Connection) -> None:
    result.send("up")
    while True:
        command = channel.receive(rank)
        result.send(command)
        if command == "stop":
            return
        time.sleep(pause_s)
