"""Exercise finalizer: an executor that cleans up when it is collected, and is never collected.

vLLM 0.25.1: vllm/v1/executor/multiproc_executor.py (MultiprocExecutor._init_executor: weakref.finalize)
Articles: part 2 §2.3.1, §4.5
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="The finalizer that never runs",
    chapter=14,
    minutes=15,
    hints=(
        "`weakref.finalize` holds the object weakly and the callback strongly. What does a bound method hold?",
        "The callback must not know the executor, only what has to be ended. A static method and its arguments do.",
        "`weakref.finalize(self, _end_workers, self.workers)` with a function outside of the class. `shutdown` calls the "
        "finalizer, `self._finalizer()`: it runs its callback at most once, whoever calls it first.",
    ),
)
