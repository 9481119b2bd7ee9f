"""Exercise two-nets: a death pipe and a SIGTERM handler, each right alone, that cancel each other.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (WorkerProc.monitor_death_pipe, worker_main)
Articles: part 2 §2.3.8, §2.4.7, §2.4.8
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Two safety nets that cancel each other",
    chapter=14,
    minutes=20,
    hints=(
        "Follow one flag through both nets: who sets it, and what does each of the two take it to mean?",
        "There are two facts here: somebody has asked for an end, and the end has begun. Which of them does the signal "
        "handler need?",
        "A second flag, `ending`, which is set where the clean-up begins and by the handler itself before it raises. The "
        "handler looks at that one only.",
    ),
)
