"""Step-through: a recorded run one event at a time, back and forth, with what every process and queue is in.

vLLM 0.25.1: no counterpart
Articles: part 1 §2–§8, part 2 §2.3–§2.6
"""

from __future__ import annotations

from minivllm.stepper.history import History
from minivllm.stepper.state import RunState
from minivllm.stepper.steps import Kind, Step, Walk

__all__ = ["History", "Kind", "RunState", "Step", "Walk"]
