"""Python values inside msgpack messages: arguments, results, exceptions and functions of utility calls.

vLLM 0.25.1: vllm/v1/serial_utils.py (UtilityResult, run_method)
Articles: part 2 §2.3.7

They are pickled. Both ends belong to one user, and the socket lies in a directory that nobody else may enter.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.executor import by_value


def pickle_result(value: Any) -> bytes:
    """Pickle what a call returns; objects of classes of the client's main script arrive as objects of just those."""
    try:
        return pickle.dumps(value)
    except by_value.CANNOT_PICKLE:
        return by_value.dumps(value)


def encode_exception(error: BaseException) -> bytes:
    """Pickle an exception; one that cannot travel becomes a RuntimeError with its type and text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}\n{text}"))


def decode_exception(data: bytes) -> BaseException:
    """The other half of encode_exception."""
    error: Any = pickle.loads(data)
    return error if isinstance(error, BaseException) else RuntimeError(str(error))


@dataclass(frozen=True, slots=True)
class FunctionByValue:
    """A function on its way from the client to the workers.

    It stays pickled in EngineCore, which must not import what the function needs (torch, above all).
    """

    name: str
    data: bytes

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionByValue:
        import cloudpickle

        return cls(cls.name_of(function), cloudpickle.dumps(function))

    @staticmethod
    def name_of(function: Callable[..., Any]) -> str:
        """What messages call it."""
        return getattr(function, "__name__", type(function).__name__)

    def as_callable(self) -> Callable[..., Any]:
        """Something that the executor can call, or pickle: it arrives at a worker as the function itself."""
        return _Unpickling(self)


class _Unpickling:
    def __init__(self, function: FunctionByValue) -> None:
        self._function = function
        self.__name__ = function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pickle.loads(self._function.data)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._function.data,)


class BoundCall:
    """A function, or a worker's method, with arguments that only the caller's script or notebook knows.

    Pickled by themselves, the arguments would name classes that no other process finds. As a part of one function, which
    travels by value, they take their classes with them, the same ones that the function refers to.
    """

    def __init__(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        self._method, self._args, self._kwargs = method, args, kwargs or {}
        self.__name__ = method if isinstance(method, str) else FunctionByValue.name_of(method)

    def __call__(self, worker: Any) -> Any:
        if isinstance(self._method, str):
            return getattr(worker, self._method)(*self._args, **self._kwargs)
        return self._method(worker, *self._args, **self._kwargs)

    @staticmethod
    def is_needed(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether some argument is of such a class, or cannot be pickled by name at all."""
        if not args and not kwargs:
            return False
        try:
            # Without the contents of large arrays, which name nothing.
            return b"__main__" in pickle.dumps((args, kwargs), 5, buffer_callback=lambda buffer: None)
        except Exception:
            return True
