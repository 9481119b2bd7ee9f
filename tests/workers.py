"""Real workers without torch: they start in a fraction of a second, so that hundreds of failures can be tried.

They run in real worker processes under the real executors; only the model is missing.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from minivllm import tracing
from minivllm.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from minivllm.worker.worker_base import WorkerBase

# A test that hangs asks for the stacks of all its processes (tests/scenario.py).
faulthandler.register(signal.SIGUSR2, all_threads=True)


class Odd(Exception):
    """Cannot be pickled, and its text cannot be had."""

    def __init__(self) -> None:
        self.handle = threading.Lock()

    def __str__(self) -> str:
        raise ValueError("no text")


class FailsToLoad:
    """Pickles, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_on_load, ("cannot be loaded",)


def _raise_on_load(text: str) -> None:
    raise LookupError(text)


class LateOutput(AsyncModelRunnerOutput):
    """Comes after `delay_s`; or fails, or is something that cannot be pickled."""

    def __init__(self, value: Any, delay_s: float = 0.0) -> None:
        self.value = value
        self.delay_s = delay_s

    def get_output(self) -> Any:
        time.sleep(self.delay_s)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class LightWorker(WorkerBase):
    """Answers, fails, sleeps, spins and dies on request.

    Environment: LIGHT_INIT="step@rank=action[:argument]; …" makes a start-up step raise, exit, kill, sleep, or hang
    in a call that never gives up the GIL.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: Any = None
        self.kept_ref: weakref.ref[Any] | None = None
        self._init_action("init_worker")

    def _init_action(self, step: str) -> None:
        for part in filter(None, os.environ.get("LIGHT_INIT", "").replace(" ", "").split(";")):
            where, action = part.split("=")
            if where in (f"{step}@{self.rank}", f"{step}@*"):
                self.act(action)

    def act(self, action: str) -> None:
        kind, _, argument = action.partition(":")
        if kind == "raise":
            raise ValueError(argument or "no such weights")
        if kind == "exit":
            os._exit(int(argument))
        if kind == "kill":
            os.kill(os.getpid(), int(argument or 9))
            time.sleep(60)
        if kind == "linger":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                Path(os.environ["LIGHT_LEFT"]).touch()
                time.sleep(float(argument))
        if kind == "await_left":
            while not Path(os.environ["LIGHT_LEFT"]).exists():
                time.sleep(0.001)
        if kind == "sleep":
            time.sleep(float(argument))
        if kind == "spin":
            while True:
                pass
        if kind == "gil":
            collections.deque(itertools.repeat(0), maxlen=0)

    @tracing.instrument("worker.init_device")
    def init_device(self) -> None:
        self._init_action("init_device")

    @tracing.instrument("worker.load_model")
    def load_model(self) -> None:
        self._init_action("load_model")

    # --- what tests call

    def echo(self, value: Any = None, **kwargs: Any) -> Any:
        return value

    def identify(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def fail_on(self, rank: int, message: str = "boom") -> int:
        if self.rank == rank or rank < 0:
            raise KeyError(message)
        return self.rank

    def raise_kind(self, kind: str) -> None:
        if kind == "key":
            raise KeyError("boom")
        if kind == "assert":
            raise AssertionError
        if kind == "odd":
            raise Odd
        if kind == "note":
            error = ValueError("with a note")
            error.__notes__ = ["look here"]
            raise error
        if kind == "exit":
            sys.exit(7)

    def sleep(self, seconds: float, value: Any = None, rank: int = -1) -> Any:
        if rank in (-1, self.rank):
            time.sleep(seconds)
        return value

    def spin(self, rank: int = -1) -> None:
        """Compute for ever, in Python."""
        while rank in (-1, self.rank):
            pass

    def hold_gil(self, rank: int = -1) -> None:
        """Compute for ever in one call that never gives up the GIL."""
        if rank in (-1, self.rank):
            collections.deque(itertools.repeat(0), maxlen=0)

    def die(self, rank: int, how: str = "kill") -> int:
        if self.rank == rank:
            self.act(how)
        return self.rank

    def fail_before_peer(self, failing: int, seconds: float) -> int:
        """One rank raises, the others wait as they would in a collective."""
        if self.rank == failing:
            raise RuntimeError("failed before the all-reduce")
        time.sleep(seconds)
        return self.rank

    def leave_and_be_missed(self, how: str, marker: str) -> None:
        """Rank 0 ends in the middle of a collective; rank 1 is told that by what rank 0 does first, and fails."""
        if self.rank == 0:
            # The time for cleaning up is longer than what an error of a peer needs to arrive.
            self.take_time_to_shut_down(0.5, os.devnull)
            try:
                self.act(how)
                sys.exit(7)
            finally:
                Path(marker).touch()
        while not Path(marker).exists():
            time.sleep(0.001)
        raise RuntimeError("rank 0 failed in the middle of a step")

    def return_lambda(self) -> Any:
        return lambda: None

    def return_unloadable(self, rank: int = -1) -> Any:
        return FailsToLoad() if rank in (-1, self.rank) else "fine"

    def late(self, value: Any, delay_s: float = 0.0) -> Any:
        return LateOutput(value, delay_s)

    def late_lambda(self) -> Any:
        return LateOutput(lambda: None)

    def late_error(self) -> Any:
        return LateOutput(RuntimeError("the copy failed"))

    def keep(self, value: Any) -> None:
        self.kept = value

    def get_kept(self) -> Any:
        return self.kept

    def watch(self, value: Any) -> int:
        """Keep a weak reference to the argument only; `value` must allow one."""
        self.kept_ref = weakref.ref(value)
        return id(value)

    def is_watched_alive(self) -> bool:
        gc.collect()
        return self.kept_ref is not None and self.kept_ref() is not None

    def setting(self, name: str) -> str | None:
        return os.environ.get(name)

    def open_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def say(self, text: str) -> None:
        print(text)
        print(text, file=sys.stderr)

    def title(self) -> str:
        return Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    def take_time_to_shut_down(self, seconds: float, marker: str) -> None:
        self.farewell = seconds, marker

    # --- what the engine calls

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.kept = kv_cache_config

    def compile_or_warm_up_model(self) -> None:
        return None

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        return None if scheduler_output is None else ModelRunnerOutput(req_ids=[str(self.rank)])

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput(req_ids=[str(self.rank)])

    def take_draft_token_ids(self) -> None:
        return None

    def execute_dummy_batch(self) -> None:
        return None

    def shutdown(self) -> None:
        seconds, marker = getattr(self, "farewell", (0.0, ""))
        time.sleep(seconds)
        if marker:
            Path(marker).write_text(f"rank {self.rank}\n")


class Extension:
    """Mixed into a worker by worker_extension_cls."""

    rank: int

    def extended(self) -> str:
        return f"extension on rank {self.rank}"
