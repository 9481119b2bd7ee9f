"""Exercise one-slot: a shared-memory channel with room for one command and no acknowledgement.

vLLM 0.25.1: no counterpart (nano-vllm's channel is of this kind)
Articles: part 2 §2.5.2
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Find the bug: this one-slot queue loses a command",
    chapter=9,
    minutes=15,
    hints=(
        "What does `send` know about the readers when it stores a command? What would it have to know?",
        "An event says only one thing: there is something. The other direction is missing: I have taken it. One "
        "such acknowledgement for all readers is not enough, since one of them may be slow.",
        "Give each reader a semaphore that says that the slot is free as far as this reader is concerned: "
        "`context.Semaphore(1)`. `send` acquires all of them before it stores; a reader releases its own when it has "
        "the command in hand, and not before.",
    ),
)
