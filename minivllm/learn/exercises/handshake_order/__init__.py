"""Exercise handshake-order: two queues between two processes, and handshakes that wait for each other.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor, WorkerProc.worker_main)
Articles: part 2 §2.3.1, §2.4.8
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Two handshakes that wait for each other",
    chapter=2,
    minutes=15,
    hints=(
        "In the handshake of one queue, who waits for whom? The writer waits until all readers have attached, which they "
        "have here before either function runs. The readers wait until the writer has been in its handshake.",
        "So a writer never waits long, and a reader waits for a step of the other side. Which of its two parts does each "
        "side do first, the one of a writer or the one of a reader?",
        "Only one side may begin as a reader. The worker reads the broadcast ring and does that first; so the executor, which "
        "writes it, must do that first as well. The deadline is one for all handshakes: `time.monotonic() + limit_s`, and "
        "what is left of it for each.",
    ),
)
