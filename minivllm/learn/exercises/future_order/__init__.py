"""Exercise future-order: futures that take whatever response comes next.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (FutureWrapper)
Articles: part 2 §2.1, §3.8, §4.2
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="FutureWrapper out of order: the second future gets the first answer",
    chapter=10,
    minutes=25,
    hints=(
        "Responses come in the order of the calls. If somebody wants the third result first, whose response is it that is "
        "read first, and where does it belong?",
        "Keep the futures that have no response yet in a deque. Whoever waits takes futures from its left end and gives "
        "each its response, until his own has one. An exception is stored in the future that it belongs to, and raised "
        "only by that one's `result`.",
        "Two threads that drain at once would each take a future and then read in any order. Hold one lock around "
        "`popleft` and `recv` together, and look again whether your own future is done once you have it.",
    ),
)
