"""What the workers of both engines can be asked for."""

from __future__ import annotations

import os
import time
from typing import Any


class Poison:
    """Pickles, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ()


def _raise() -> None:
    raise ValueError("cannot unpickle me")


class Methods:
    """No model: answers, fails, sleeps and spins on request."""

    rank: int
    kept: Any

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def fail_on(self, rank: int, value: Any) -> tuple[int, Any]:
        if self.rank == rank:
            raise KeyError("boom")
        return self.rank, value

    def fail_empty(self) -> None:
        raise AssertionError

    def sleep(self, seconds: float, value: Any) -> tuple[int, Any]:
        time.sleep(seconds)
        return self.rank, value

    def spin(self) -> None:
        while True:
            time.sleep(0.2)

    def return_lambda(self) -> Any:
        return lambda: None

    def return_poison(self) -> Any:
        return Poison()

    def ignore(self, value: Any = None) -> None:
        return None

    def keep(self, array: Any) -> tuple[int, int]:
        self.kept = array
        return self.look()

    def look(self) -> tuple[int, int]:
        return int(self.kept[0]), int(self.kept[-1])

    def traced(self) -> Any:
        """vLLM: ends a span, and says whose process it carries."""
        from opentelemetry import trace

        with trace.get_tracer("worker").start_as_current_span("worker-rpc"):
            pass
        resource: Any = trace.get_tracer_provider()
        return resource.resource.attributes.get("vllm.process_name")

    def pid(self) -> int:
        return os.getpid()
