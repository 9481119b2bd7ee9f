"""Exercise flag-last: the slot of a ring whose flags change in the wrong order.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue.acquire_write, acquire_read)
Articles: part 2 §2.5.2
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Torn messages: the flag says yes before the data is there",
    chapter=9,
    minutes=20,
    hints=(
        "The readers know nothing but the flags. What may be in the slot at the moment in which `written` becomes 1?",
        "After `written` is 1, a reader may come, read and set its flag at any moment. What happens to that flag when the "
        "writer clears the flags afterwards?",
        "Writer: `written = 0`, the message, the readers' flags to 0, `written = 1`. Reader: take the message out, and "
        "only then set the flag, since the flag is the permission to write over it.",
    ),
)
