"""Flag-last: a slot whose stores are slow, a writer that does not lose time, and two readers that look all the time.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

READERS = 2
LENGTH = 32
PIECE = 8
STORE_S = 0.004
MESSAGES = [bytes([letter]) * LENGTH for letter in b"abcdef"]


class SlowSlot:
    """One slot in shared memory; storing a piece of a message, and loading one, takes a moment."""

    def __init__(self) -> None:
        self.n_readers = READERS
        self._memory = kit.context.RawArray("B", 1 + READERS + LENGTH)

    @property
    def written(self) -> int:
        return int(self._memory[0])

    @written.setter
    def written(self, flag: int) -> None:
        self._memory[0] = flag
        time.sleep(STORE_S)

    def taken_by(self, reader: int) -> int:
        return int(self._memory[1 + reader])

    def set_taken_by(self, reader: int, flag: int) -> None:
        self._memory[1 + reader] = flag
        time.sleep(STORE_S)

    def store(self, message: bytes) -> None:
        for i in range(0, LENGTH, PIECE):
            start = 1 + READERS + i
            self._memory[start : start + PIECE] = list(message[i : i + PIECE])
            time.sleep(STORE_S)

    def load(self) -> bytes:
        pieces = []
        for i in range(0, LENGTH, PIECE):
            start = 1 + READERS + i
            pieces.append(bytes(self._memory[start : start + PIECE]))
            time.sleep(STORE_S)
        return b"".join(pieces)

    def glance(self) -> bytes:
        """The message as it is at this moment."""
        return bytes(self._memory[1 + READERS :])

    def is_free(self) -> bool:
        return not self.written or all(self.taken_by(reader) for reader in range(READERS))


class _Right:
    """The other side, when only one side is on trial."""

    @staticmethod
    def publish(slot: SlowSlot, message: bytes) -> None:
        slot.written = 0
        slot.store(message)
        for reader in range(READERS):
            slot.set_taken_by(reader, 0)
        slot.written = 1

    @staticmethod
    def take(slot: SlowSlot, reader: int) -> bytes | None:
        if slot.written == 0 or slot.taken_by(reader):
            return None
        message = slot.glance()
        slot.set_taken_by(reader, 1)
        return message


def check_data_before_flag(module: Any) -> None:
    """`written` is set only when the whole message is in the slot."""
    for reader, got in enumerate(_run(module.publish, _Right.take)):
        for expected, message in zip(MESSAGES, got, strict=False):
            if message not in MESSAGES[: MESSAGES.index(expected) + 1]:
                raise kit.Broken(
                    f"reader {reader} took {_describe(message)}, when the message was to be {_describe(expected)}"
                )


def check_flags_before_written(module: Any) -> None:
    """When `written` is set, the flags of the readers have been cleared: no message is taken twice, none is passed over."""
    for reader, got in enumerate(_run(module.publish, _Right.take)):
        if got != MESSAGES:
            raise kit.Broken(f"reader {reader} took {_short(got)} instead of {_short(MESSAGES)}")


def check_taken_before_flag(module: Any) -> None:
    """A reader gives the slot up only when it has taken everything out."""
    for reader, got in enumerate(_run(_Right.publish, module.take)):
        torn = next((message for message in got if len(set(message)) > 1), None)
        if torn:
            raise kit.Broken(
                f"reader {reader} took {_describe(torn)}: the next message was written while it was reading"
            )
        if got != MESSAGES:
            raise kit.Broken(f"reader {reader} took {_short(got)} instead of {_short(MESSAGES)}")


def _describe(message: bytes) -> str:
    parts = [(letter, len(list(group))) for letter, group in itertools.groupby(message)]
    return ", ".join(
        f"{count} bytes of {chr(letter)!r}" if letter else f"{count} zeros" for letter, count in parts
    )


def _short(messages: list[bytes]) -> list[str]:
    return [message[:1].decode() + "…" for message in messages]


def _run(publish: Any, take: Any) -> list[list[bytes]]:
    """What each reader took."""
    slot = SlowSlot()
    pipes = [kit.context.Pipe(duplex=False) for _ in range(READERS)]
    readers = [kit.start(_read, slot, reader, take, pipes[reader][1]) for reader in range(READERS)]
    try:
        for ours, _ in pipes:
            if not ours.poll(10 * kit.slack()):
                raise kit.Broken("a reader did not start")
            ours.recv()
        kit.within(10, "publishing six messages, each when the slot is free,", _write, slot, publish)
        got = [ours.recv() if ours.poll(10 * kit.slack()) else [] for ours, _ in pipes]
        return got
    finally:
        kit.end(*readers)


def _write(slot: SlowSlot, publish: Any) -> None:
    for message in MESSAGES:
        if not kit.until(slot.is_free, 1.5):
            raise kit.Broken(f"the slot never became free for the message {message[:1].decode()}…")
        publish(slot, message)


def _read(slot: SlowSlot, reader: int, take: Any, result: Connection) -> None:
    result.send("up")
    got: list[bytes] = []
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < (0.25 if len(got) >= len(MESSAGES) else 2.0) * kit.slack():
        message = take(slot, reader)
        if message is None:
            time.sleep(0.0002)
            continue
        got.append(message)
        quiet_since = time.monotonic()
        if len(got) > 3 * len(MESSAGES):
            break
    result.send(got)
