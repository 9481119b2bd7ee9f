"""The span API (being built; this file has the signatures and does nothing yet)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

OFF, LIFECYCLE, RPC, MESSAGE = 0, 1, 2, 3
level = OFF
active = False
F = TypeVar("F", bound=Callable[..., Any])


class Span:
    context: bytes = b""

    def set(self, **attributes: Any) -> None: ...
    def event(self, name: str, **attributes: Any) -> None: ...
    def record_exception(self, exc: BaseException) -> None: ...
    def end(self) -> None: ...
    def __enter__(self) -> Span:
        return self

    def __exit__(self, *exc: Any) -> None: ...


_NULL = Span()


def span(name: str, *, parent: bytes | None = None, links: tuple[bytes, ...] = (), kind: str = "internal", attrs: dict[str, Any] | None = None, **attributes: Any) -> Span:
    return _NULL


def start_span(name: str, **kwargs: Any) -> Span:
    return _NULL


def instrument(name: str, **attributes: Any) -> Callable[[F], F]:
    return lambda f: f


def pack_context() -> bytes:
    return b""


def current_span() -> Span:
    return _NULL


@contextmanager
def child_environment() -> Iterator[None]:
    yield


def configure(role: str, rank: int | None = None, **kwargs: Any) -> None: ...
def shutdown() -> None: ...
def flush() -> None: ...
def attach_board(memory: memoryview) -> None: ...
