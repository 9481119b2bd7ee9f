"""How much of /dev/shm an engine takes: the sizes of its segments, for those who make them and for whoever asks beforehand.

vLLM 0.25.1: no counterpart
Articles: part 2 §2.5.1, §4.4

No torch here: the command line asks, and so does a process that has none.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from minivllm import envs
from minivllm.distributed.shm_ring import ring_layout
from minivllm.distributed.shm_segment import NotEnoughSharedMemory
from minivllm.exceptions import ConfigError

if TYPE_CHECKING:
    from minivllm.config import VllmConfig

LINE_BYTES: Final = 64
MAX_COLLECTIVE_BYTES: Final = 1 << 20  # contribution of one rank; what is larger goes through gloo
_HIDDEN_SLOTS: Final = 4
_HIDDEN_SLOT_BYTES: Final = 1 << 20
_TOKENS_SLOT_BYTES: Final = 1 << 16  # 8192 tokens, or more if a message has more


@dataclass(frozen=True, slots=True)
class Route:
    """A channel between pipeline stages: one writer, one or more readers, by their ranks in the group."""

    writer: int
    readers: tuple[int, ...]
    slots: int
    slot_bytes: int

    @property
    def num_lines(self) -> int:
        return 1 + len(self.readers)

    @property
    def num_bytes(self) -> int:
        return self.slots * self.slot_bytes


def state_bytes(world_size: int, num_lines: int) -> int:
    """The lines of state at the beginning of a group's segment: a line per rank, and `num_lines` more."""
    return (world_size + num_lines) * LINE_BYTES


def collectives_bytes(world_size: int) -> int:
    """Two banks of one buffer per rank."""
    return 2 * MAX_COLLECTIVE_BYTES * world_size


def routes(world_size: int, max_token_bytes: int) -> list[Route]:
    """The channels of a pipeline group: from each stage to the next, and from the last one to all others."""
    last = world_size - 1
    # At most world_size + 1 batches are in flight, and a stage reads what has come before each of its own.
    slot_bytes = max(_TOKENS_SLOT_BYTES, -(-max_token_bytes // LINE_BYTES) * LINE_BYTES)
    return [
        *(Route(rank, (rank + 1,), _HIDDEN_SLOTS, _HIDDEN_SLOT_BYTES) for rank in range(last)),
        Route(last, tuple(range(last)), 2 * world_size + 4, slot_bytes),
    ]


def max_token_bytes(vllm_config: VllmConfig) -> int:
    """Size of the longest message in which the last stage hands tokens back."""
    # Per request at most: a token, the drafts that stand, and the drafts that are proposed next.
    columns = 1 + 2 * vllm_config.num_speculative_tokens
    return 8 * columns * vllm_config.scheduler_config.max_num_seqs


def engine_bytes(vllm_config: VllmConfig) -> int:
    """All that an engine takes of /dev/shm while it starts, when it takes the most; nothing without worker processes."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "uni" or (
        parallel.distributed_executor_backend is None and parallel.world_size == 1
    ):
        return 0
    tp, pp, world_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size
    chunks = envs.MINIVLLM_MQ_MAX_CHUNK_BYTES, envs.MINIVLLM_MQ_MAX_CHUNKS
    segments = [ring_layout(world_size, *chunks).size, *([ring_layout(1, *chunks).size] * world_size)]
    if vllm_config.device == "cpu":
        if tp > 1:
            segments += [state_bytes(tp, 0) + collectives_bytes(tp)] * pp
        if pp > 1:
            ways = routes(pp, max_token_bytes(vllm_config))
            lines, data = sum(way.num_lines for way in ways), sum(way.num_bytes for way in ways)
            segments += [state_bytes(pp, lines) + data] * tp
    return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in segments)


def engine_need(vllm_config: VllmConfig) -> str:
    """`TP=2 needs 34.1 MiB`, rounded up: so much is enough."""
    parallel = vllm_config.parallel_config
    sizes = f"TP={parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        sizes += f" PP={parallel.pipeline_parallel_size}"
    return f"{sizes} needs {math.ceil(engine_bytes(vllm_config) / 2**20 * 10) / 10:.1f} MiB"


@contextmanager
def naming_the_whole_need(vllm_config: VllmConfig) -> Iterator[None]:
    """An error about one segment also says what all of them take: enlarging by the one would not do."""
    try:
        yield
    except NotEnoughSharedMemory as error:
        raise ConfigError(f"{error.found} ({engine_need(vllm_config)} in all); {error.advice}") from None
