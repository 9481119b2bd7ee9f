"""A million messages of mixed sizes between processes, each with a number and a check sum: none lost, doubled or torn.

python tests/benchmarks/stress_mq.py [--messages N] [--readers N] [--chunk-bytes N] [--chunks N] [--seed N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
import zlib
from typing import Any

from minivllm.distributed.shm_broadcast import Handle, MessageQueue


def sizes(seed: int) -> Any:
    """Mostly small, sometimes near a slot's size, now and then several slots, rarely megabytes."""
    dice = random.Random(seed)
    while True:
        kind = dice.random()
        limit = 400 if kind < 0.95 else 6_000 if kind < 0.998 else 200_000 if kind < 0.9999 else 5_000_000
        yield int(dice.random() * limit)


def check(handle: Handle, rank: int, messages: int, seed: int, results: Any) -> None:
    """A reader: every message must have the next number, the size that the seed says, and a right check sum."""
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready(60)
    expected = sizes(seed)
    problem = ""
    for number in range(messages):
        got, crc, body = queue.dequeue(timeout=60)
        if got != number or len(body) != next(expected) or zlib.crc32(body) != crc:
            problem = f"reader {rank}: message {number} came as {got} with {len(body)} bytes"
            break
    results.put(problem)
    queue.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = MessageQueue(
        options.readers, options.readers, max_chunk_bytes=options.chunk_bytes, max_chunks=options.chunks
    )
    results = context.SimpleQueue()
    processes = [
        context.Process(
            target=check,
            args=(queue.export_handle(), rank, options.messages, options.seed, results),
            daemon=True,
        )
        for rank in range(options.readers)
    ]
    for process in processes:
        process.start()
    queue.wait_until_ready(60)
    size = sizes(options.seed)
    noise = random.Random(options.seed).randbytes(5_000_000 + 4096)
    total = 0
    started = time.monotonic()
    for number in range(options.messages):
        length = next(size)
        start = number % 4096
        body = noise[start : start + length]
        total += length
        queue.enqueue((number, zlib.crc32(body), body), timeout=60)
    problems = [results.get() for _ in processes]
    seconds = time.monotonic() - started
    for process in processes:
        process.join()
    queue.shutdown()
    for problem in filter(None, problems):
        print(problem)
    rate = options.messages / seconds
    print(
        f"{options.messages} messages, {total / 1e6:.0f} MB, {options.readers} readers, {seconds:.1f} s, "
        f"{rate:.0f} messages/s: {'FAILED' if any(problems) else 'all arrived whole and in order'}"
    )
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
