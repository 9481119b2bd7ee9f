"""One slot, with an acknowledgement per reader.

A semaphore per reader says that the slot is free as far as this reader is concerned. The writer takes all of them
before it stores, so it waits for the slowest reader and for no one else. A reader gives its own back only when it has
the command in hand. With a second slot the writer could be one command ahead; that is the ring of chapter 9.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (ShmRingBuffer: the flag of each reader)
Articles: part 2 §2.5.2
"""

from multiprocessing.context import SpawnContext
from typing import Any


class OneSlotChannel:
    """One writer, several readers, room for one command of up to 64 bytes."""

    def __init__(self, context: SpawnContext, n_readers: int) -> None:
        self.slot: Any = context.Array("c", 64)
        self.filled = [context.Event() for _ in range(n_readers)]
        self.taken = [context.Semaphore(1) for _ in range(n_readers)]

    def send(self, command: str) -> None:
        """Give a command to all readers, once they have taken the last one."""
        for taken in self.taken:
            taken.acquire()
        self.slot.value = command.encode()
        for event in self.filled:
            event.set()

    def receive(self, rank: int) -> str:
        """Wait for the next command; each reader calls this with its own rank."""
        self.filled[rank].wait()
        self.filled[rank].clear()
        command: str = self.slot.value.decode()
        self.taken[rank].release()
        return command
