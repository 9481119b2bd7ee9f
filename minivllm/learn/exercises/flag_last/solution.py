"""The data before the flag that announces it, and out of the slot before the flag that gives it up.

Each flag is a promise about what was stored before it. `written` promises the message and the readers' flags; a reader's
flag promises that it will not look at the slot any more. On processors that let stores become visible out of order, a
memory fence must stand before each of the two; chapter 9 shows where.

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
    slot.written = 0
    slot.store(message)
    for reader in range(slot.n_readers):
        slot.set_taken_by(reader, 0)
    slot.written = 1


def take(slot: Slot, reader: int) -> bytes | None:
    """The message, or None when there is none that this reader has not taken."""
    if slot.written == 0 or slot.taken_by(reader) == 1:
        return None
    message = slot.load()
    slot.set_taken_by(reader, 1)
    return message
