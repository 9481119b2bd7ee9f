"""A run with two counting workers that is stepped through while it runs: python tests/live_run.py [COMMANDS]"""

from __future__ import annotations

import os
import sys
import time


def main(commands: str) -> None:
    from minivllm import LLM, SamplingParams

    with LLM(
        worker_cls="counting_worker.CountingWorker",
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        device="cpu",
        max_model_len=200,
        live_step=commands or True,
    ) as llm:
        print("the engine is ready", flush=True)
        llm.generate(["a b c"], SamplingParams(max_tokens=2, ignore_eos=True))
        print("generated", flush=True)
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    print("all is over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
