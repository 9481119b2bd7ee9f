"""Results that pickle cannot take, since they are of classes that this process knows from the caller's script only.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.enqueue_output)
Articles: part 2 §2.4.10

A function of the caller's script arrives at a worker with copies of the script's classes, which pickle finds under no
name there. Deviation from vLLM: such a result comes back, and as the caller's own class; there it cannot be sent.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any, Final

# What pickle raises for an object that it cannot take.
CANNOT_PICKLE: Final = (pickle.PicklingError, AttributeError, TypeError)


def dumps(obj: Any) -> bytes:
    """Pickle with the script's classes and functions beside it. pickle.loads is the other half.

    Raises:
        Exception: it holds something else that pickle cannot take.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__"):
            return NotImplemented
        import cloudpickle

        by_value = cloudpickle.dumps(obj)
        if isinstance(obj, type):
            return _script_class, (obj.__qualname__, by_value)
        return pickle.loads, (by_value,)


def _script_class(qualname: str, by_value: bytes) -> Any:
    """The class of that name in this process's own script, or else a copy of the sender's.

    cloudpickle alone would find the caller's class, too, and then set all its attributes to copies of themselves, whose
    functions have lost the module's global variables.
    """
    found: Any = sys.modules["__main__"]
    try:
        for name in qualname.split("."):
            found = getattr(found, name)
    except AttributeError:
        return pickle.loads(by_value)
    return found
