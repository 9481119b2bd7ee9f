"""Exercise ready-pipe: a pipe that is read too late, and an end of it that is open in one process too many.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.make_worker_process, wait_for_ready)
Articles: part 1 §3, part 2 §2.4.3, §2.4.4
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="A start that hangs when the child has much to say, and when it says nothing",
    chapter=3,
    minutes=20,
    hints=(
        "A pipe holds 64 KiB on Linux. What does a writer do with the rest, and until when?",
        "A pipe reports its end to the reader when *no* process has the writing end open. Count the processes that have "
        "it after `start`.",
        "Right after `start`: `writer.close()` in the parent. Then `recv`, with `EOFError` for a child that went "
        "without a word; then `join`; and close the reading end whatever happened.",
    ),
)
