"""The step board: one line of shared memory in which a process keeps the names of the steps it has open.

vLLM 0.25.1: none (a dead or late worker is reported without the step it was in)
Articles: part 2 §2.3.2

Layout of the line, native byte order: u32 depth, then 14 u16 catalogue indices, outermost first. One writer (the
thread that attached the board), any number of readers; no lock, since a torn read only yields a step that was
open a moment ago.
"""

from __future__ import annotations

from minivllm.tracing.catalogue import BY_INDEX
from minivllm.tracing.place import ThreadState, local
from minivllm.tracing.spec import RPC

BOARD_BYTES = 64
MAX_DEPTH = 14


class Board:
    """The writer's side."""

    __slots__ = ("_depth", "_open", "_steps")

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes < BOARD_BYTES:
            raise ValueError(f"a step board needs {BOARD_BYTES} bytes, got {memory.nbytes}")
        line = memory.cast("B")[:BOARD_BYTES]
        self._depth = line[:4].cast("I")
        self._steps = line[4 : 4 + 2 * MAX_DEPTH].cast("H")
        self._open = 0
        self._depth[0] = 0

    def push(self, index: int) -> int:
        """Open a step; returns the depth to give to `restore` when it ends."""
        depth = self._open
        # The entry is written before the depth that makes it visible.
        if depth < MAX_DEPTH:
            self._steps[depth] = index
        self._open = self._depth[0] = depth + 1
        return depth

    def restore(self, depth: int) -> None:
        """End a step and whatever was opened inside it and not ended."""
        self._open = self._depth[0] = depth

    def release(self) -> None:
        """Let go of the memory, so that its owner can unmap it. What it shows stays."""
        self._depth.release()
        self._steps.release()


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
    line = memory.cast("B")[:BOARD_BYTES]
    depth = min(line[:4].cast("I")[0], MAX_DEPTH)
    steps = line[4 : 4 + 2 * MAX_DEPTH].cast("H")[:depth].tolist()
    return [BY_INDEX[index - 1].name for index in steps if 0 < index <= len(BY_INDEX)]
