"""Exercise stale-answers: a time-out that leaves answers behind for the next call.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor.collective_rpc, WorkerProc.worker_busy_loop)
Articles: part 2 §2.3.7, §2.4.13, §4.2
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Add a response timeout without stale answers",
    chapter=10,
    minutes=35,
    hints=(
        "After a time-out, which messages are still on their way, and who will read them?",
        "Reading them away before the next call does not help: they may come later. An answer must say which call it is to. "
        "Give each call a number, let the worker send it back, and drop what does not match.",
        "One deadline, `time.monotonic() + timeout`, made once. For each rank: poll for what is left of it, receive, drop "
        "answers with an older number, and go on with that same rank. Do not raise at the first failure either: take all "
        "answers first, or rely on the numbers.",
    ),
)
