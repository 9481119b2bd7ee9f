"""The caller of one crash-matrix cell: a TP=2 run from start to shutdown that says what happened to it.

Usage: caller.py TRACE_DIR [light]. Each line on stdout is one JSON event with the wall-clock time in nanoseconds:
up, ran, down, or error with the exception's type and text. `light` runs workers that bring no model and no torch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "at_ns": time.time_ns(), **fields}), flush=True)


def report_error(error: BaseException) -> None:
    report("error", type=type(error).__name__, text=str(error))


def main() -> int:
    trace_dir, light = sys.argv[1], "light" in sys.argv[2:]
    from minivllm import LLM, SamplingParams

    options: dict[str, Any] = {"worker_cls": "tests.crash.light_worker.LightWorker"} if light else {}
    llm = None
    code = 0
    try:
        llm = LLM(
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            max_model_len=64,
            max_num_seqs=4,
            trace=trace_dir,
            **options,
        )
        report("up")
        llm.generate(["A class is", "The"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        llm.collective_rpc("check_health")
        report("ran")
    except BaseException as error:
        report_error(error)
        code = 1
    if llm is not None:
        try:
            llm.shutdown()
        except BaseException as error:
            report_error(error)
            code = 1
    report("down")
    return code


if __name__ == "__main__":
    sys.exit(main())
