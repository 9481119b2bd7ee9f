"""Collectives between ranks of one host through shared memory; large tensors go through gloo.

vLLM 0.25.1: vllm/distributed/device_communicators/cpu_communicator.py (CpuCommunicator, _CPUSHMDistributed)
Articles: part 1 §5, part 2 §4.4

A decode step of a small model makes a dozen collectives of a few kilobytes each. gloo takes 60 to 100 microseconds
for one of them, a copy into shared memory and a flag take about ten.

A rank's line of state holds its sequence number and the sizes of its contributions; the data are two banks of one
buffer per rank. Collective number n uses bank n % 2:

1. A rank writes its contribution into its buffer of bank n % 2, and only then sets its sequence number to n.
2. A rank reads the others' buffers only after it has seen their sequence numbers at n or later.
3. A rank writes bank n % 2 again in collective n + 2. To get there it has seen everyone's n + 1, which a rank
   sets only after it has finished reading bank n % 2. So one wait per collective is enough.
4. Every rank adds the contributions in the order of ranks, so that all get the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.distributed.shm_group import CollectiveError, ShmGroup, fence
from minivllm.distributed.shm_sizes import MAX_COLLECTIVE_BYTES as MAX_BYTES
from minivllm.distributed.shm_sizes import collectives_bytes

__all__ = ["MAX_BYTES", "CollectiveError", "CpuCommunicator"]

_BYTES: Final = 1  # index in a rank's line: bytes of its contribution in bank 0, then in bank 1
_MAX_CACHED_VIEWS: Final = 256


class _Views:
    """Tensors over the buffers of one bank for one shape: this rank's own, and all ranks' in order."""

    __slots__ = ("all", "mine")

    def __init__(self, mine: Tensor, all_ranks: list[Tensor]) -> None:
        self.mine = mine
        self.all = all_ranks


class CpuCommunicator(ShmGroup):
    """Collectives of one group of ranks on CPU tensors; arguments as ShmGroup."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank_in_group: int,
        unique_name: str,
        timeout_s: float,
    ) -> None:
        self._sequence = 0
        self._views: dict[tuple[torch.Size, torch.dtype], tuple[_Views, _Views]] = {}
        data_bytes = collectives_bytes(len(ranks))
        super().__init__(group, ranks, rank_in_group, unique_name, timeout_s, 0, data_bytes)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the ranks, in place, with the same bits on every rank. `input_` must be contiguous.

        Raises:
            CollectiveError: a peer died, failed, is late, or is at a different collective.
        """
        size = input_.nbytes
        if size > MAX_BYTES or self._segment is None:
            dist.all_reduce(input_, group=self.group)
            return input_
        parts = self._exchange(input_, size)
        torch.add(parts[0], parts[1], out=input_)
        for part in parts[2:]:
            input_.add_(part)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors joined along `dim`, in the order of ranks. `input_` must be contiguous.

        Raises:
            CollectiveError: as all_reduce.
        """
        size = input_.nbytes
        if size > MAX_BYTES or self._segment is None:
            parts = [torch.empty_like(input_) for _ in self.ranks]
            dist.all_gather(parts, input_, group=self.group)
            return torch.cat(parts, dim)
        return torch.cat(self._exchange(input_, size), dim)

    def _exchange(self, input_: Tensor, size: int) -> list[Tensor]:
        if self._failure is not None:
            raise CollectiveError(self._failure)
        views = self._views.get((input_.shape, input_.dtype))
        if views is None:
            views = self._make_views(input_)
        self._sequence = sequence = self._sequence + 1
        parity = sequence & 1
        bank = views[parity]
        bank.mine.copy_(input_)
        state, word = self._state, self._my_word
        state[word + _BYTES + parity] = size
        fence()
        state[word] = sequence
        for peer_word in self._peer_words:
            if state[peer_word] < sequence:
                self._wait(peer_word, sequence, peer_word)
        fence()
        for peer_word in self._peer_words:
            if state[peer_word + _BYTES + parity] != size:
                self._fail(
                    f"rank {self._rank_of(peer_word)} brings {state[peer_word + _BYTES + parity]} bytes and this "
                    f"rank {size}: the ranks run different programs"
                )
        return bank.all

    def _make_views(self, input_: Tensor) -> tuple[_Views, _Views]:
        if len(self._views) >= _MAX_CACHED_VIEWS:
            # Prefill brings a new shape nearly every time; the few shapes of decode come back at once.
            self._views.clear()
        size, start = input_.nbytes, self._data_start
        banks = []
        for bank in range(2):
            first = start + bank * self.world_size * MAX_BYTES
            offsets = (first + rank * MAX_BYTES for rank in range(self.world_size))
            parts = [self._base[o : o + size].view(input_.dtype).view(input_.shape) for o in offsets]
            banks.append(_Views(parts[self.rank_in_group], parts))
        views = self._views[(input_.shape, input_.dtype)] = (banks[0], banks[1])
        return views

    def _describe(self) -> str:
        return f"collective {self._sequence}"

    def close(self) -> None:
        self._views.clear()
        super().close()
