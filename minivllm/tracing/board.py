"""The step board: one line of shared memory in which a process keeps the names of the steps it has open.

vLLM 0.25.1: none (a dead or late worker is reported without the step it was in)
Articles: part 2 §2.3.2

Layout of the line, native byte order: up to 14 u16 catalogue indices, outermost first, and zeros. One writer (the thread
that attached the board), any number of readers; no lock, since a torn read only yields a step that was open a moment
ago.
"""

from __future__ import annotations

from minivllm.tracing.catalogue import BY_INDEX
from minivllm.tracing.place import ThreadState, local
from minivllm.tracing.spec import RPC

BOARD_BYTES = 64
MAX_DEPTH = 14


class Board:
    """The writer's side.

    The hot path does what `push` and `restore` do by itself.

    Attributes:
        open: how many steps are open.
        steps: `[MAX_DEPTH + 1]`, zero from `open` on.
    """

    __slots__ = ("open", "steps")

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes < BOARD_BYTES:
            raise ValueError(f"a step board needs {BOARD_BYTES} bytes, got {memory.nbytes}")
        self.steps = memory.cast("B")[:BOARD_BYTES].cast("H")
        self.open = 0
        self.restore(0)

    def push(self, index: int) -> int:
        """Open a step; returns the depth to give to `restore` when it ends."""
        depth = self.open
        if depth < MAX_DEPTH:
            self.steps[depth] = index
        self.open = depth + 1
        return depth

    def restore(self, depth: int) -> None:
        """End a step and whatever was opened inside it and not ended."""
        self.open = depth
        # From the outermost on: what is behind a zero does not show.
        for place in range(depth, MAX_DEPTH + 1):
            self.steps[place] = 0

    def release(self) -> None:
        """Let go of the memory, so that its owner can unmap it. What it shows stays."""
        self.steps.release()


_attached: ThreadState | None = None


def attach_board(memory: memoryview) -> None:
    """Keep the names of the steps that the calling thread has open in this line of shared memory (64 bytes).

    Steps that are open already are entered at once. Other threads do not disturb it.
    """
    global _attached
    detach_board()
    board, thread = Board(memory), local.thread
    stack = []
    item = thread.current
    while item is not None:
        stack.append(item)
        item = item.outer
    for item in reversed(stack):
        if item.spec.level <= RPC:
            item.depth = board.push(item.spec.index)
    thread.board = board
    _attached = thread


def detach_board() -> None:
    """Let go of the board's memory so that it can be unmapped. What it shows stays."""
    global _attached
    thread, _attached = _attached, None
    if thread is not None and thread.board is not None:
        board, thread.board = thread.board, None
        board.release()


def read_board(memory: memoryview) -> list[str]:
    """Return the names of the steps open in the process that writes this board, outermost first.

    A line that nobody has written yet, or one that holds garbage, gives an empty list or skips the bad entries.
    """
    names = []
    for index in memory.cast("B")[:BOARD_BYTES].cast("H"):
        if not index:
            break
        if index <= len(BY_INDEX):
            names.append(BY_INDEX[index - 1].name)
    return names
