"""An exception on its way to another process: as text, since exceptions often do not survive pickling.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.enqueue_output)
Articles: part 2 §2.4.10, §2.4.13

Deviation from vLLM: type, notes and traceback travel along; there `str(e)` is all that arrives, which is empty for a
bare assert.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple


class RemoteException(NamedTuple):
    """What the caller is told of an exception.

    Attributes:
        type_name: qualified name of the exception's type, without "builtins.".
        message: its message and notes, or what is wrong with them.
        traceback: as Python prints it.
    """

    type_name: str
    message: str
    traceback: str


def describe_exception(error: BaseException) -> RemoteException:
    """Never raises, whatever the exception's own methods do."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error) or "(no message)"
    except Exception as broken:
        message = f"(no message: its __str__ raised {type(broken).__name__})"
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        message = "\n".join([message, *(note for note in notes if isinstance(note, str))])
    try:
        stack = "".join(traceback.format_exception(kind, error, error.__traceback__))
    except Exception as broken:
        stack = "".join(traceback.format_tb(error.__traceback__))
        stack += f"{name} (not printable: {type(broken).__name__})\n"
    return RemoteException(name, message, stack)
