"""Ready-pipe: children that say little, much, and nothing.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

# More than a pipe holds, on every system.
LONG = 2 << 20


def check_read_before_join(module: Any) -> None:
    """The pipe is read before the child is waited for, since a pipe holds only so much."""
    message = _run(module, "run_child, with a message that is larger than a pipe,", _send, LONG)
    if message != "x" * LONG:
        raise kit.Broken("the message did not arrive whole")


def check_end_of_file(module: Any) -> None:
    """A writing end is open in one process only, so the death of that process is an end of file."""
    try:
        message = _run(module, "run_child, with a child that dies before it is ready,", _die, 7)
    except RuntimeError as error:
        if "7" not in str(error):
            raise kit.Broken(f"the child's exit code was 7, and the error does not say so: {error}") from None
    else:
        raise kit.Broken(f"the child sent nothing, and run_child returned {message!r}")


def check_nothing_stays_open(module: Any) -> None:
    """Afterwards the child has been reaped, and both ends of the pipe are closed in the parent."""
    before = _open()
    for _ in range(2):
        pid = _run(module, "run_child", _send_pid)
        _must_be_reaped(pid)
    new = _open() - before
    if new:
        raise kit.Broken(f"two calls have left {len(new)} descriptors open: {sorted(new)}")


def _must_be_reaped(pid: int) -> None:
    try:
        found, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
    raise kit.Broken("the child has ended and has not been waited for" if found else "the child still runs")


def _run(module: Any, what: str, *args: Any) -> Any:
    return kit.within(2.5, what, module.run_child, kit.context, *args)


def _send(writer: Connection, length: int) -> None:
    try:
        writer.send("x" * length)
    except OSError:
        pass  # the check is over


def _send_pid(writer: Connection) -> None:
    writer.send(os.getpid())


def _die(writer: Connection, code: int) -> None:
    os._exit(code)


def _open() -> set[int]:
    found = set()
    for number in range(200):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.add(number)
    return found
