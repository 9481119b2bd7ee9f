"""Messages between pipeline stages of one host through shared memory.

vLLM 0.25.1: vllm/distributed/device_communicators/cpu_communicator.py (CpuCommunicator.send_tensor_dict,
recv_tensor_dict)
Articles: part 2 §2.3.10, §4.4

Each channel is a ring of slots with one writer. Hidden states go from each stage to the next, sampled tokens from the
last stage to all others. Both ends know the shapes (they lay out the same batch), so that bytes are all that is sent.

1. The writer copies into slot n % slots only after every reader has counted n - slots + 1 slots as read.
2. It counts the slot as written only after the copy; a reader copies out only after it has seen the count.
3. A sender waits only when the ring is full: a stage goes on with the next batch while its neighbour computes.
4. The ring for tokens has room for more steps than can be in flight, so that no two stages wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.distributed.shm_group import WORDS, CollectiveError, ShmGroup, fence
from minivllm.distributed.shm_sizes import Route, routes


class Channel:
    """One writer, one or more readers.

    Args:
        route: who writes, who reads, and how much fits.
        first_line: the writer's line of state; the readers' follow.
        start: first byte of the slots in the segment.
    """

    def __init__(self, route: Route, first_line: int, start: int) -> None:
        self.writer, self.readers = route.writer, route.readers
        self.slots, self.slot_bytes, self.start = route.slots, route.slot_bytes, start
        self.written = first_line * WORDS
        self.read = {reader: (first_line + 1 + i) * WORDS for i, reader in enumerate(route.readers)}
        self.position = 0  # slots that this rank has written or read


class CpuChannels(ShmGroup):
    """The channels of one pipeline group; arguments as ShmGroup.

    Args:
        max_token_bytes: size of the longest message from the last stage to the others; it must fit into one slot.

    Attributes:
        to_next, from_previous: hidden states; None on the last or first stage.
        tokens: sampled tokens, from the last stage to all others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank_in_group: int,
        unique_name: str,
        timeout_s: float,
        max_token_bytes: int = 0,
    ) -> None:
        world_size, last = len(ranks), len(ranks) - 1
        channels: list[Channel] = []
        line, offset = world_size, 0
        for route in routes(world_size, max_token_bytes):
            channels.append(Channel(route, line, offset))
            line += route.num_lines
            offset += route.num_bytes
        self._doing = "the set-up"
        super().__init__(group, ranks, rank_in_group, unique_name, timeout_s, line - world_size, offset)
        self.to_next = channels[rank_in_group] if rank_in_group < last else None
        self.from_previous = channels[rank_in_group - 1] if rank_in_group else None
        self.tokens = channels[last]

    @property
    def usable(self) -> bool:
        """Whether all ranks share memory."""
        return self._segment is not None

    def write(self, channel: Channel, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` into the ring; waits while it is full.

        Raises:
            CollectiveError: a reader died, failed or is late.
        """
        self._begin("send", channel)
        state, slot_bytes = self._state, channel.slot_bytes
        for piece in _pieces(tensors, slot_bytes):
            least = channel.position + 1 - channel.slots
            for reader, word in channel.read.items():
                if state[word] < least:
                    self._wait(word, least, reader * WORDS)
            self._copy(channel, piece, into_slot=True)
            fence()
            channel.position += 1
            state[channel.written] = channel.position

    def read(self, channel: Channel, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous `tensors` with the next message; waits until it is there.

        Raises:
            CollectiveError: the writer died, failed or is late.
        """
        self._begin("receive", channel)
        state = self._state
        for piece in _pieces(tensors, channel.slot_bytes):
            if state[channel.written] <= channel.position:
                self._wait(channel.written, channel.position + 1, channel.writer * WORDS)
            fence()
            self._copy(channel, piece, into_slot=False)
            fence()
            channel.position += 1
            state[channel.read[self.rank_in_group]] = channel.position

    def is_readable(self, channel: Channel) -> bool:
        """Whether the next message has begun to arrive."""
        return self._failure is None and self._state[channel.written] > channel.position

    def _begin(self, verb: str, channel: Channel) -> None:
        if self._failure is not None:
            raise CollectiveError(self._failure)
        self._doing = f"{verb} {channel.position + 1}"

    def _describe(self) -> str:
        return self._doing

    def _copy(self, channel: Channel, piece: list[Tensor], into_slot: bool) -> None:
        offset = self._data_start + channel.start + channel.position % channel.slots * channel.slot_bytes
        for part in piece:
            size = part.shape[0]
            slot = self._base[offset : offset + size]
            if into_slot:
                slot.copy_(part)
            else:
                part.copy_(slot)
            offset += size


def _pieces(tensors: Sequence[Tensor], slot_bytes: int) -> Iterator[list[Tensor]]:
    """The bytes of `tensors` in pieces of one slot, the last one perhaps smaller; views, not copies."""
    piece: list[Tensor] = []
    room = slot_bytes
    for tensor in tensors:
        rest = tensor.view(-1).view(torch.uint8)
        while rest.shape[0]:
            part, rest = rest[:room], rest[room:]
            piece.append(part)
            room -= part.shape[0]
            if not room:
                yield piece
                piece, room = [], slot_bytes
    if piece:
        yield piece
