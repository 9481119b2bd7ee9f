"""Small real runs, recorded once per test session: LLM with two counting workers, at level message.

python tests/real_runs.py DIR [LEVEL [PP]]      records one
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LIMIT_S = 120


@functools.cache
def recorded(failpoints: str = "", level: str = "message", pp: int = 1) -> Path:
    """The trace directory of a run of `pp` pipeline stages with two workers each; gone with the session's temporary files.

    The run may fail, as a failpoint may want it to.
    """
    directory = Path(tempfile.mkdtemp(prefix="run-")) / "trace"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MINIVLLM_T", "MINIVLLM_F", "OTEL_"))}
    env |= {"MINIVLLM_FAILPOINTS": failpoints, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(TESTS / "real_runs.py"), str(directory), level, str(pp)],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == (1 if "kill" in failpoints or "raise" in failpoints else 0), done.stderr
    return directory


def main(directory: str, level: str = "message", pp: str = "1") -> None:
    from minivllm import LLM, SamplingParams

    with LLM(
        worker_cls="counting_worker.CountingWorker",
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        pipeline_parallel_size=int(pp),
        device="cpu",
        max_model_len=200,
        trace=directory,
        trace_level=level,
    ) as llm:
        llm.generate(["a b c", "d"], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.collective_rpc("check_health")


if __name__ == "__main__":
    main(*sys.argv[1:])
