"""Future-order: a real worker process that answers in order.

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


def check_own_answer(module: Any) -> None:
    """A result is that of its own call, whichever future is asked first."""
    with _client(module) as client:
        futures = [client.call("echo", f"answer {i}") for i in range(4)]
        for i in (2, 0, 3, 1):
            got = kit.within(3, f"result() of call {i}", futures[i].result)
            if got != f"answer {i}":
                raise kit.Broken(
                    f"the results of four calls were asked in the order 2, 0, 3, 1; call {i} got {got!r}"
                )


def check_own_error(module: Any) -> None:
    """An error belongs to the call that failed: an older one's is not raised to whoever waits for a younger one."""
    with _client(module) as client:
        failing, fine = client.call("fail", "no such weights"), client.call("echo", "fine")
        try:
            got = kit.within(3, "result() of the second call", fine.result)
        except RuntimeError as error:
            raise kit.Broken(
                f"the second call succeeded, and its result() raised the first one's error: {error}"
            ) from None
        if got != "fine":
            raise kit.Broken(f"the second call got {got!r} instead of 'fine'")
        try:
            got = kit.within(3, "result() of the first call", failing.result)
        except RuntimeError as error:
            if "no such weights" not in str(error):
                raise kit.Broken(f"the first call raised {error!r} without the worker's text") from None
        else:
            raise kit.Broken(f"the first call failed in the worker, and its result() returned {got!r}")


def check_asked_twice(module: Any) -> None:
    """Asking twice gives the same result, and takes nothing from a later call."""
    with _client(module) as client:
        first, second = client.call("echo", "first"), client.call("echo", "second")
        got = [kit.within(3, "result()", future.result) for future in (first, first, second)]
        if got != ["first", "first", "second"]:
            raise kit.Broken(f"the first future was asked twice, then the second one; they said {got}")


def check_two_threads(module: Any) -> None:
    """Several threads may wait, for the same future and for different ones."""
    with _client(module) as client:
        # All threads are inside while the first call still runs.
        futures = [client.call("echo_after", 0.15, "slow"), *(client.call("echo", i) for i in range(8))]
        calls = [kit.Call(future.result) for future in reversed(futures)]
        calls += [kit.Call(futures[0].result), kit.Call(futures[4].result)]
        got = [call.result(4, "result() in one of eleven threads") for call in calls]
        expected = [*reversed(range(8)), "slow", "slow", 3]
        if got != expected:
            raise kit.Broken(f"eleven threads got {got} instead of {expected}")


@contextmanager
def _client(module: Any) -> Iterator[Any]:
    ours, theirs = kit.context.Pipe()
    worker = kit.start(_worker, theirs)
    theirs.close()
    try:
        yield module.Client(ours)
    finally:
        kit.end(worker)


def _worker(connection: Connection) -> None:
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        if method == "fail":
            connection.send(("failed", *args))
            continue
        if method == "echo_after":
            time.sleep(args[0])
        connection.send(("ok", args[-1]))
