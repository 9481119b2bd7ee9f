"""Find the bug: this one-slot queue loses a command.

The parent has a channel to its workers: one slot in shared memory, and an event per reader that says that there is
something in it. It works as long as every command is answered before the next one is sent. Then somebody sends two
commands in a row.

Change the class so that every reader gets every command. Keep the names and arguments of its methods; what else the
object has is up to you. It is made once, in the parent, and given to all processes.

vLLM 0.25.1: no counterpart (nano-vllm's channel is of this kind)
Articles: part 2 §2.5.2
"""

from multiprocessing.context import SpawnContext
from typing import Any


class OneSlotChannel:
    """One writer, several readers, room for one command of up to 64 bytes."""

    def __init__(self, context: SpawnContext, n_readers: int) -> None:
        self.slot: Any = context.Array("c", 64)
        self.filled = [context.Event() for _ in range(n_readers)]

    def send(self, command: str) -> None:
        """Give a command to all readers."""
        self.slot.value = command.encode()
        for event in self.filled:
            event.set()

    def receive(self, rank: int) -> str:
        """Wait for the next command; each reader calls this with its own rank."""
        self.filled[rank].wait()
        self.filled[rank].clear()
        command: str = self.slot.value.decode()
        return command
