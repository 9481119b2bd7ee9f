"""Walkthrough 9: from a one-slot channel that loses commands to the ring of flags, and a full ring with a name on it.

    python walkthroughs/09_message_queue.py [--trace DIR]

No model and no engine here: two reader processes and the queue itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

import common
from common import closing, console, measured, say, step, table

from minivllm import tracing
from minivllm.distributed.shm_broadcast import Handle, MessageQueue

COMMANDS = ["load", "step 1", "step 2", "step 3"]


# --8<-- [start:one-slot]
def one_slot_reader(slot: Any, ready: Event, result: Connection, seconds_per_command: float) -> None:
    """Take whatever is in the slot each time the event is set."""
    result.send("up")
    got = []
    while ready.wait(timeout=0.5):
        ready.clear()
        got.append(slot.value.decode())
        time.sleep(seconds_per_command)
    result.send(got)


def send_without_acknowledgement(slot: Any, events: list[Event]) -> None:
    for command in COMMANDS:
        slot.value = command.encode()
        for event in events:
            event.set()
        time.sleep(0.01)


# --8<-- [end:one-slot]


def reader(handle: Handle, rank: int, may_read: Synchronized[int], result: Connection) -> None:
    """Read as many messages as `may_read` allows, then say what came."""
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready(10)
    got = []
    while len(got) < len(COMMANDS):
        if len(got) < may_read.value:
            got.append(queue.dequeue(timeout=10))
        else:
            time.sleep(0.005)
    result.send(got)
    queue.shutdown()


def show(queue: MessageQueue) -> None:
    states = table("slot", "written", "read by 0", "read by 1", "state")
    for slot in queue.snapshot():
        flags = [str(int(flag)) for flag in (slot.written, *slot.read_by)]
        states.add_row(str(slot.index), *flags, slot.state)
    console.print(states)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a reader did not get there")
        time.sleep(0.002)


def main() -> None:
    args = common.options(__doc__ or "")
    logging.disable(logging.WARNING)
    tracing.configure("client", trace_dir=str(args.trace), level=tracing.MESSAGE)
    context = multiprocessing.get_context("spawn")

    step("One slot and an event per reader, no acknowledgement")
    slot = context.Array("c", 64)
    events = [context.Event(), context.Event()]
    pipes = [context.Pipe(duplex=False) for _ in events]
    readers = [
        context.Process(target=one_slot_reader, args=(slot, event, pipe[1], pause))
        for event, pipe, pause in zip(events, pipes, (0.0, 0.05), strict=True)
    ]
    for process in readers:
        process.start()
    for pipe in pipes:
        pipe[0].recv()
    send_without_acknowledgement(slot, events)
    for rank, (process, pipe) in enumerate(zip(readers, pipes, strict=True)):
        got = pipe[0].recv()
        process.join()
        # How many the slow one loses is a matter of time.
        shown = measured if rank else str
        console.print(f"  reader {rank} got {shown(len(got))} of {len(COMMANDS)}: {shown(', '.join(got))}")
    say(
        "The slow reader lost commands, and nobody was told. Ranks that run different commands hang in their next collective."
    )

    step("The ring: one flag per reader is the acknowledgement")
    with tracing.span("run"):
        queue = MessageQueue(2, 2, max_chunk_bytes=4096, max_chunks=3, name="walkthrough")
        may_read = [context.Value("i", 0), context.Value("i", 0)]
        pipes = [context.Pipe(duplex=False) for _ in may_read]
        readers = [
            context.Process(target=reader, args=(queue.export_handle(), rank, may_read[rank], pipes[rank][1]))
            for rank in range(2)
        ]
        for process in readers:
            process.start()
        queue.wait_until_ready(30)
        for command in COMMANDS[:2]:
            queue.enqueue(command, timeout=1)
        say("Two messages are written, nobody has read:")
        show(queue)
        may_read[0].value = 1
        until(lambda: queue.snapshot()[0].read_by[0])
        say("Reader 0 has read the first; reader 1 has not, so the writer may not take slot 0:")
        show(queue)

        step("A full ring waits for the slowest reader, and says who it is")
        queue.enqueue(COMMANDS[2], timeout=1)
        try:
            queue.enqueue(COMMANDS[3], timeout=0.3)
        except TimeoutError as error:
            console.print(f"  TimeoutError: {error}")

        step("Let both readers go on: nothing is lost")
        for value in may_read:
            value.value = len(COMMANDS)
        queue.enqueue(COMMANDS[3], timeout=10)
        for rank, (process, pipe) in enumerate(zip(readers, pipes, strict=True)):
            got = pipe[0].recv()
            process.join()
            console.print(f"  reader {rank} got {len(got)} of {len(COMMANDS)}: {', '.join(got)}")
        queue.shutdown()
    tracing.shutdown()
    closing(
        args.trace, "minivllm timeline {trace} --json     every enqueue with its slot, bytes and waiting time"
    )


if __name__ == "__main__":
    main()
