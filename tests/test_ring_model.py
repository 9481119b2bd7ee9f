"""Every interleaving of the ring's protocol, and that the explorer would find what is wrong with a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
from mq_helpers import queue

from minivllm.distributed import ring_model
from minivllm.distributed.explorer import Jump, Label, Load, Store, Wake
from minivllm.distributed.ring_model import VARIANTS, Ring, explore
from minivllm.distributed.wakeup import SpinCondition


def test_two_readers_and_two_slots() -> None:
    """No lost or torn message, no deadlock, no lost wake-up; the third message takes the first slot again."""
    result = explore(Ring(readers=2, chunks=2, messages=3))
    assert not result.violation, "\n".join(result.steps)
    assert result.states > 100_000


@pytest.mark.parametrize("memory", ["tso", "pso"])
@pytest.mark.parametrize(("readers", "chunks", "messages"), [(1, 1, 3), (1, 2, 4), (2, 1, 1)])
def test_stores_that_become_visible_late(memory: str, readers: int, chunks: int, messages: int) -> None:
    """B2: x86 lets loads overtake stores, ARM also lets stores overtake stores; the fences are where they must be."""
    result = explore(Ring(readers, chunks, messages), memory)
    assert not result.violation, "\n".join(result.steps)


@pytest.mark.parametrize(
    ("memory", "readers", "chunks", "messages"),
    [("sc", 1, 2, 3), ("sc", 2, 1, 1), ("tso", 1, 1, 2), ("pso", 1, 1, 2)],
)
def test_large_messages_that_are_read_while_they_are_written(
    memory: str, readers: int, chunks: int, messages: int
) -> None:
    result = explore(Ring(readers, chunks, messages, large=True), memory)
    assert not result.violation, "\n".join(result.steps)


@pytest.mark.parametrize(
    ("memory", "readers", "messages", "large"),
    [
        ("sc", 1, 4, False),
        ("sc", 2, 2, False),
        ("tso", 1, 3, False),
        ("pso", 1, 3, False),
        ("sc", 1, 3, True),
    ],
)
def test_messages_that_take_the_spare_place(memory: str, readers: int, messages: int, large: bool) -> None:
    result = explore(Ring(readers, 2, messages, large=large, spare=True), memory)
    assert not result.violation, "\n".join(result.steps)


TORN = "expects message"
STUCK = "nobody can go on"

# Variant, memory, readers, slots, messages, what goes wrong.
WRONG = [
    ("written-before-data", "sc", 1, 1, 1, TORN),
    ("flags-after-written", "sc", 1, 1, 2, TORN),
    ("read-flag-before-data", "sc", 1, 1, 2, TORN),
    ("progress-before-part", "sc", 1, 1, 1, TORN),
    ("one-reader-awaited", "sc", 2, 1, 2, TORN),
    ("spare-not-awaited", "sc", 1, 2, 2, TORN),
    ("no-look-after-flag", "sc", 1, 1, 1, STUCK),
    ("word-after-flag", "sc", 1, 1, 1, STUCK),
    ("bump-before-lowering", "sc", 1, 1, 2, STUCK),
    ("no-bump", "sc", 1, 1, 1, STUCK),
    ("counted-bump", "sc", 2, 1, 3, STUCK),
    ("fence-as-in-vllm", "pso", 1, 1, 2, TORN),
    ("no-fence-in-notify", "pso", 1, 1, 2, STUCK),
    ("no-fence-before-look", "tso", 1, 1, 1, STUCK),
    ("no-fence-before-sleep-flag", "tso", 1, 1, 1, STUCK),
]


@pytest.mark.parametrize(("variant", "memory", "readers", "chunks", "messages", "failure"), WRONG)
def test_a_wrong_protocol_is_found(
    variant: str, memory: str, readers: int, chunks: int, messages: int, failure: str
) -> None:
    result = explore(
        Ring(
            readers,
            chunks,
            messages,
            variant,
            large=variant.startswith("progress"),
            spare=variant.startswith("spare"),
        ),
        memory,
        shortest=messages < 3,
    )
    assert failure in result.violation
    assert result.steps


def test_each_wrong_protocol_has_its_test() -> None:
    assert {case[0] for case in WRONG} == set(VARIANTS)


@pytest.mark.parametrize("variant", ["fence-as-in-vllm", "no-fence-in-notify"])
def test_x86_does_not_need_every_fence(variant: str) -> None:
    assert not explore(Ring(1, 1, 3, variant), "tso").violation


def test_the_command_shows_the_shortest_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert ring_model.main(["--readers", "1", "--chunks", "1", "--messages", "1"]) == 0
    assert "no message is lost or torn" in capsys.readouterr().out
    assert ring_model.main(["written-before-data", "--readers", "1"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "=> reader 0 expects message 1 and gets halves 0 and 0"
    assert "   1 writer: reads slot 0 read by 0: 1" in shown


class Recorder:
    """A mapping that writes down, in the model's words, what is read and written."""

    def __init__(self, inner: Any, names: dict[int, str], log: list[tuple[str, str]]) -> None:
        self.inner, self.names, self.log = inner, names, log

    def _note(self, kind: str, key: Any) -> None:
        start, stop = (key.start, key.stop) if isinstance(key, slice) else (key, key + 1)
        for offset in range(start, stop):
            if offset in self.names and (kind, self.names[offset]) not in self.log[-1:]:
                self.log.append((kind, self.names[offset]))

    def __getitem__(self, key: Any) -> Any:
        self._note("load", key)
        return self.inner[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note("store", key)
        self.inner[key] = value


def test_the_code_does_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of loads and stores of a real enqueue and dequeue, with a peer that sleeps, is that of the model."""
    monkeypatch.setattr("minivllm.distributed.wakeup.futex_wake", lambda _: log.append(("wake", "")))
    log: list[tuple[str, str]] = []
    with queue(2, max_chunks=2) as (writer, readers):
        for end, other in ((writer, "readers"), (readers[0], "writer")):
            ring = end.buffer
            written, first, _, word, data, _, _ = ring.slots[0]
            names = {written: "slot 0 written", data: "slot 0 data", data + 1: "slot 0 data"}
            names |= {first + reader: f"slot 0 read by {reader}" for reader in range(2)}
            names |= {word * 8: "slot 0 data"}
            condition: SpinCondition = ring.readers_wake if other == "readers" else ring.writer_wake
            names |= {condition.flag: f"{other} asleep", condition._word: f"{other} word"}
            recorder = Recorder(ring.mm, names, log)
            ring.mm[condition.flag] = 1
            monkeypatch.setattr(condition, "_mm", recorder)
            monkeypatch.setattr(ring, "mm", recorder)
            log.clear()
            if end is writer:
                writer.enqueue(b"xy")
                program = Ring(2, 2, 1).writer()
            else:
                assert readers[0].dequeue() == b"xy"
                program = Ring(2, 2, 1).reader(0)
            expected = [step for step in map(_step, _without_waiting(program)) if step is not None]
            expected = [step for i, step in enumerate(expected) if step not in expected[i - 1 : i]]
            if end is writer:
                # The code reads the written flag only when a reader flag is not set.
                assert log == expected
            else:
                assert log == expected
            ring.mm = recorder.inner
            condition._mm = recorder.inner


@pytest.mark.parametrize("read", [False, True])
def test_the_code_takes_the_spare_place_as_the_model_does(
    monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """A second large message, when the first one has been read by all, or not: the loads before it, and where it lies."""
    first, second = (bytes([number]) * (512 << 10) for number in (1, 2))
    log: list[tuple[str, str]] = []
    with queue(2, max_chunks=2) as (writer, readers):
        ring = writer.buffer
        writer.enqueue(first)
        if read:
            assert all(reader.dequeue(1) == first for reader in readers)
        names = {ring.slots[1][0]: "slot 1 written", ring.slots[0][0]: "slot 0 written"}
        names |= {ring.slots[0][1] + reader: f"slot 0 read by {reader}" for reader in range(2)}
        monkeypatch.setattr(ring, "mm", Recorder(ring.mm, names, log))
        writer.enqueue(second)
        monkeypatch.undo()
        choosing = Ring(2, 2, 2, spare=True)._choose(2, 1)
        if read:
            choosing = _without_waiting(choosing, skipped="spare")
        expected = [step for step in map(_step, choosing) if step and step[1] != "spare serves"]
        assert log == [*expected, ("store", "slot 1 written")]
        assert ring.snapshot()[1].spare == read
        for reader in readers:
            assert [reader.dequeue(1) for _ in range(2 - read)] == [first, second][read:]


def _without_waiting(program: list[Any], skipped: str = "take") -> list[Any]:
    """The path of an enqueue that finds a free slot, or a dequeue that finds a message: the first jump there is made."""
    kept: list[Any] = []
    skip_to = ""
    for item in program:
        if isinstance(item, Label) and item.name == skip_to:
            skip_to = ""
        if not skip_to:
            if isinstance(item, Jump) and item.label.startswith(skipped):
                skip_to = item.label
            kept.append(item)
    return kept


def _step(item: Any) -> tuple[str, str] | None:
    match item:
        case Load(_, address):
            return ("load", address.removesuffix(" a").removesuffix(" b"))
        case Store(address, _):
            return ("store", address.removesuffix(" a").removesuffix(" b"))
        case Wake(_):
            return ("wake", "")
    return None
