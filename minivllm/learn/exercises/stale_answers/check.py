"""Stale-answers: three workers that are slow, or fail, in the call before.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

RANKS = 3


def check_after_a_failure(module: Any) -> None:
    """After a call that failed on one rank, the next call gets its own answers."""
    with _executor(module) as executor:
        for failing in range(RANKS):
            try:
                kit.within(3, "collective_rpc", executor.collective_rpc, "fail_on", (failing, "boom"))
            except RuntimeError as error:
                if "boom" not in str(error):
                    raise kit.Broken(f"the worker's text is not in the error: {error}") from None
            else:
                raise kit.Broken(f"rank {failing} raised, and the call reported success")
            _must_answer(executor, f"new {failing}", f"a call that failed on rank {failing}")


def check_after_a_timeout(module: Any) -> None:
    """After a call that timed out, the next call gets its own answers, also when the old ones come in between."""
    with _executor(module) as executor:
        late_s = 0.4 * kit.slack()
        try:
            kit.within(
                3, "collective_rpc", executor.collective_rpc, "sleep", ([late_s] * RANKS, "old"), late_s / 4
            )
        except TimeoutError:
            pass
        else:
            raise kit.Broken(
                f"all ranks slept for {late_s:.1f} s, and a limit of {late_s / 4:.1f} s did not end the call"
            )
        _must_answer(executor, "new", "a call that timed out")
        _must_answer(executor, "newer", "two calls before which one timed out")


def check_names_the_late(module: Any) -> None:
    """A time-out names the ranks that have not answered, and no other."""
    with _executor(module) as executor:
        limit_s = 0.3 * kit.slack()
        try:
            executor.collective_rpc("sleep", ([0.0, 4 * limit_s, 0.0], "x"), limit_s)
        except TimeoutError as error:
            named = [rank for rank in range(RANKS) if f"rank {rank}" in str(error)]
            if named != [1]:
                raise kit.Broken(f"rank 1 was late, and the error says: {error}") from None
        else:
            raise kit.Broken("rank 1 was late, and the call did not time out")


def check_one_deadline(module: Any) -> None:
    """The limit is for the whole call, not for each rank."""
    with _executor(module) as executor:
        limit_s = 0.5 * kit.slack()
        # Each rank is late by less than the limit after the one before.
        delays = [0.7 * limit_s, 1.4 * limit_s, 2.1 * limit_s]
        started = time.monotonic()
        try:
            executor.collective_rpc("sleep", (delays, "x"), limit_s)
        except TimeoutError:
            took_s = time.monotonic() - started
            if took_s > 1.35 * limit_s:
                raise kit.Broken(f"the limit was {limit_s:.2f} s, and it took {took_s:.2f} s") from None
        else:
            raise kit.Broken(
                f"the limit was {limit_s:.2f} s; the call waited {time.monotonic() - started:.2f} s and succeeded"
            )


def _must_answer(executor: Any, value: str, after: str) -> None:
    got = kit.within(4, "collective_rpc", executor.collective_rpc, "echo", (value,))
    if got != [value] * RANKS:
        raise kit.Broken(f"after {after}, a call for {value!r} returned {got}")


@contextmanager
def _executor(module: Any) -> Iterator[Any]:
    pipes = [kit.context.Pipe() for _ in range(RANKS)]
    workers = [kit.start(_worker, module.worker_loop, rank, pipes[rank][1]) for rank in range(RANKS)]
    for ours, theirs in pipes:
        theirs.close()
        if not ours.poll(10 * kit.slack()):
            raise kit.Broken("a worker did not start")
        ours.recv()
    try:
        yield module.Executor([ours for ours, _ in pipes])
    finally:
        kit.end(*workers)


def _worker(worker_loop: Any, rank: int, connection: Connection) -> None:
    def fail_on(failing: int, text: str) -> str:
        if rank == failing:
            raise KeyError(text)
        return "old"

    def sleep(seconds: list[float], value: str) -> str:
        time.sleep(seconds[rank])
        return value

    connection.send("up")
    worker_loop(connection, {"echo": lambda value: value, "fail_on": fail_on, "sleep": sleep})
