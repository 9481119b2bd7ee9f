"""A run with two counting workers that is stepped through while it runs: python tests/live_run.py [COMMANDS]

"-" for COMMANDS: it just runs. CALL_LIMIT_S and PAUSE_S in the environment: see below.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm import LLM


def ask(what: str, call: Callable[[], object], workers: Sequence[int] = ()) -> None:
    """Call, and say what came of it and how long it took; of a call that is late, also where everybody was."""
    started = time.monotonic()
    try:
        answer = call()
    except TimeoutError as error:
        answer = f"TimeoutError: {error}"
        if workers:
            faulthandler.dump_traceback()
            for pid in workers:
                os.kill(pid, signal.SIGUSR2)
    print(f"{what} after {time.monotonic() - started:.2f} s: {answer}", flush=True)


def call_with_limits(llm: LLM, limit_s: float) -> None:
    """Calls of `limit_s` each: of a method with a step to stop at, of one in which nobody stops, and of check_health."""
    from minivllm.executor import abstract

    ask("enter_step", lambda: llm.collective_rpc("enter_step", timeout=limit_s))
    abstract.HEALTH_TIMEOUT_S = limit_s
    executor = llm.llm_engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined]
    workers = [worker.pid for worker in executor.workers]
    other = threading.Thread(target=llm.collective_rpc, args=("enter_step",))
    other.start()
    time.sleep(0.1)  # its call is the first of the two
    ask("check_health", executor.check_health, workers)
    other.join()
    ask("sleep", lambda: llm.collective_rpc("sleep", timeout=limit_s, args=(4 * limit_s,)))


def main(commands: str) -> None:
    from minivllm import LLM, SamplingParams

    with LLM(
        worker_cls="counting_worker.CountingWorker",
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        device="cpu",
        max_model_len=200,
        live_step=commands != "-" and (commands or True),
    ) as llm:
        print("the engine is ready", flush=True)
        llm.generate(["a b c"], SamplingParams(max_tokens=2, ignore_eos=True))
        print("generated", flush=True)
        if limit := os.environ.get("CALL_LIMIT_S"):
            call_with_limits(llm, float(limit))
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    print("all is over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
