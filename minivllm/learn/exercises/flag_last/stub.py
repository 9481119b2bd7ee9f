"""Torn messages: the flag says yes before the data is there.

A slot of a ring is a piece of shared memory with one byte `written`, one byte per reader that says "I have taken it",
and the message. The writer calls `publish` when the slot is free: never written, or taken by all. Each reader calls
`take` over and over.

Stores to this memory are slow, so that what usually takes a lucky moment happens every time. Change the order of
things so that every reader gets every message whole and once.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue.acquire_write, acquire_read)
Articles: part 2 §2.5.2
"""

from typing import Protocol


class Slot(Protocol):
    """One slot. In new memory all flags are 0."""

    n_readers: int

    @property
    def written(self) -> int: ...
    @written.setter
    def written(self, flag: int) -> None: ...
    def taken_by(self, reader: int) -> int: ...
    def set_taken_by(self, reader: int, flag: int) -> None: ...
    def store(self, message: bytes) -> None: ...
    def load(self) -> bytes: ...


def publish(slot: Slot, message: bytes) -> None:
    """Put a message into a slot that is free."""
    slot.written = 1
    slot.store(message)
    for reader in range(slot.n_readers):
        slot.set_taken_by(reader, 0)


def take(slot: Slot, reader: int) -> bytes | None:
    """The message, or None when there is none that this reader has not taken."""
    if slot.written == 0 or slot.taken_by(reader) == 1:
        return None
    slot.set_taken_by(reader, 1)
    return slot.load()
