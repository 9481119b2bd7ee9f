"""Exercise start-together: workers that are started, and waited for, one at a time.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.wait_for_ready)
Articles: part 2 §2.3.1, §2.4.4
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="This executor never comes up: each worker is started and waited for in turn",
    chapter=3,
    minutes=15,
    hints=(
        "A worker meets all the other workers before it says READY. Who is there to be met when the first one is waited for?",
        "Start all of them, then wait. And wait for all pipes at once: "
        "`multiprocessing.connection.wait(pipes, timeout)` returns those that have something to say.",
        "Keep a dictionary from pipe to rank of those that are still missing, and one deadline, "
        "`time.monotonic() + limit_s`, made before the loop. When `wait` returns nothing and the time is over, the "
        "dictionary's values are the ranks to name.",
    ),
)
