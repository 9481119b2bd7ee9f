"""CUDA graphs: the forward pass recorded once per shape, and replayed without Python and launches between its kernels.

vLLM 0.25.1: vllm/v1/worker/gpu/cudagraph_utils.py (CudaGraphManager, BatchExecutionDescriptor),
vllm/config/compilation.py (CUDAGraphMode)
Articles: part 1 §7, §8.3

A graph has fixed shapes and fixed addresses. Batches are padded to the next recorded shape, and every input lies in a
buffer that stays where it is.

* FULL: a whole decode step, attention included, for a number of requests and a length that none of them exceeds. A
  padding row belongs to a slot that owns the null block only.
* PIECEWISE: any batch up to a number of tokens. Attention, whose shapes differ with every batch, runs between the
  pieces; all else depends on the number of tokens alone.
* NONE: whatever is larger, everything on a CPU, and everything with enforce_eager.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from minivllm import tracing
from minivllm.config import VllmConfig
from minivllm.forward_context import set_forward_context
from minivllm.model_executor.layers.attention import Attention
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.sequence import IntermediateTensors
from minivllm.worker.gpu.attn_utils import build_dummy_attn_metadata
from minivllm.worker.gpu.block_table import BlockTables
from minivllm.worker.gpu.input_batch import InputBatch, InputBuffers
from minivllm.worker.gpu.model_states.interface import ModelState

ForwardOutput: TypeAlias = Tensor | IntermediateTensors

_FULL_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FULL_LENGTHS: Final = (256, 1024, 4096)
_PIECEWISE_SIZES: Final = (8, 16, 32, 64, 128, 256, 512)


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class BatchExecutionDescriptor:
    """One recorded shape.

    Attributes:
        num_tokens: of the padded batch.
        longest: FULL only: tokens of the longest request that it serves.
        text: the same for a reader; made once, since each step's span says it.
    """

    mode: CUDAGraphMode
    num_tokens: int = 0
    longest: int = 0
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        limit = f", {self.longest} tokens each" if self.longest else ""
        eager = self.mode is CUDAGraphMode.NONE
        text = "none: eager" if eager else f"{self.mode.name} of {self.num_tokens}{limit}"
        object.__setattr__(self, "text", text)

    def __str__(self) -> str:
        return self.text


EAGER: Final = BatchExecutionDescriptor(CUDAGraphMode.NONE)


class RecordedForward:
    """One forward pass as graphs, and calls of attention between them if it was recorded piecewise.

    Attributes:
        graphs: one more than calls.
        calls: attention layer, its two inputs, and where its result goes; all at fixed addresses.
        output: of the model.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self.pool = pool
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[tuple[Attention, Tensor, Tensor, Tensor]] = []
        self.output: ForwardOutput | None = None

    def record(self, forward: Callable[[], ForwardOutput]) -> None:
        """Run `forward` on the current stream, which must not be the default one, and record its kernels."""
        self._begin()
        try:
            self.output = forward()
        finally:
            self.graphs[-1].capture_end()

    def attend(self, layer: Attention, q: Tensor, kv: Tensor) -> Tensor:
        """Takes the place of attention while a piecewise pass is recorded: ends one graph and begins the next."""
        self.graphs[-1].capture_end()
        out = layer.attend(q, kv)
        self.calls.append((layer, q, kv, out))
        self._begin()
        return out

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self.graphs.append(graph)
        # Other threads (copies of outputs, NCCL's watchdog) may use CUDA while this one records.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # type: ignore[arg-type]

    def replay(self, num_tokens: int) -> ForwardOutput:
        """Run it again on what the input buffers hold; attention sees the first `num_tokens` tokens."""
        for graph, (layer, q, kv, out) in zip(self.graphs, self.calls, strict=False):
            graph.replay()
            out[:num_tokens].copy_(layer.attend(q[:num_tokens], kv[:num_tokens]))
        self.graphs[-1].replay()
        assert self.output is not None
        return self.output


class CudaGraphManager:
    """Chooses, records and replays.

    Attributes:
        why_not: why nothing is recorded; "" when graphs are.
        recorded: what can be replayed.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: CausalLM,
        model_state: ModelState,
        block_tables: BlockTables,
        buffers: InputBuffers,
        intermediate_tensors: IntermediateTensors | None,
    ) -> None:
        assert vllm_config.model_config is not None
        self.model, self.model_state, self.block_tables = model, model_state, block_tables
        self.buffers, self.intermediate_tensors = buffers, intermediate_tensors
        self.device = buffers.device
        self.why_not = ""
        if self.device.type != "cuda":
            self.why_not = "a CPU has no graphs"
        elif vllm_config.model_config.enforce_eager:
            self.why_not = "enforce_eager"
        max_num_reqs, longest = buffers.max_num_reqs, model_state.max_model_len
        self.full_sizes = _up_to(_FULL_SIZES, max_num_reqs)
        self.full_lengths = _up_to(_FULL_LENGTHS, longest)
        self.piecewise_sizes = _up_to(_PIECEWISE_SIZES, buffers.max_num_tokens)
        self.slots = torch.full(
            (max_num_reqs,), block_tables.padding_slot, dtype=torch.int64, device=self.device
        )
        self.recorded: dict[BatchExecutionDescriptor, RecordedForward] = {}

    # --- recording

    @torch.inference_mode()
    def capture(self, span: tracing.Span) -> None:
        """Record all shapes, the largest of each mode first: the smaller ones find room in its memory.

        PIECEWISE comes before FULL, since its batches are larger.

        Args:
            span: gets an event per shape, sizes and memory.
        """
        if self.why_not:
            span.set(skipped=True, reason=self.why_not, mode="NONE", sizes="[]", bytes=0)
            return
        piecewise = [
            BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size) for size in reversed(self.piecewise_sizes)
        ]
        full = [
            BatchExecutionDescriptor(CUDAGraphMode.FULL, size, longest)
            for size in reversed(self.full_sizes)
            for longest in reversed(self.full_lengths)
        ]
        all_bytes = 0
        for mode, descriptors in (("piecewise", piecewise), ("full", full)):
            before, _ = torch.cuda.mem_get_info(self.device)
            for descriptor in descriptors:
                self.recorded[descriptor] = self._record(descriptor)
                span.event("captured", graph=str(descriptor))
            after, _ = torch.cuda.mem_get_info(self.device)
            span.set({f"minivllm.bytes_{mode}": before - after})
            all_bytes += before - after
        span.set(
            skipped=False,
            mode="FULL_AND_PIECEWISE",
            sizes=str([d.num_tokens for d in (*piecewise, *full)]),
            bytes=all_bytes,
            graphs=sum(len(recorded.graphs) for recorded in self.recorded.values()),
        )

    def _record(self, descriptor: BatchExecutionDescriptor) -> RecordedForward:
        self._pad(descriptor, 0)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        recorded = RecordedForward(self._pool)
        attend = recorded.attend if descriptor.mode is CUDAGraphMode.PIECEWISE else None
        with torch.cuda.stream(stream):
            # Once for real: libraries set themselves up on first use, which cannot be recorded.
            self.forward(descriptor, None)
            stream.synchronize()
            recorded.record(lambda: self.forward(descriptor, attend))
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return recorded

    @property
    def _pool(self) -> tuple[int, int]:
        for recorded in self.recorded.values():
            return recorded.pool
        pool: tuple[int, int] = torch.cuda.graph_pool_handle()
        return pool

    def forward(
        self,
        descriptor: BatchExecutionDescriptor,
        attend: Callable[[Attention, Tensor, Tensor], Tensor] | None,
    ) -> ForwardOutput:
        """The pass that is recorded, on what the buffers hold."""
        n = descriptor.num_tokens
        input_ids, positions = self.buffers.input_ids[:n], self.buffers.positions[:n]
        received = None if self.intermediate_tensors is None else self.intermediate_tensors.first(n)
        if descriptor.mode is CUDAGraphMode.FULL:
            # Part of the graph, too: block tables and positions are read anew with each replay.
            metadata = self.model_state.prepare_decodes(
                self.slots[:n], positions, descriptor.longest, self.block_tables
            )
        else:
            metadata = build_dummy_attn_metadata(n, 1, self.device)
        with set_forward_context(metadata, attend):
            return self.model.forward(input_ids, positions, received)

    # --- replaying

    def dispatch(self, batch: InputBatch) -> BatchExecutionDescriptor:
        """The smallest recorded shape that the batch fits into."""
        if not self.recorded:
            return EAGER
        if batch.num_tokens == batch.num_reqs:
            size = _at_least(self.full_sizes, batch.num_reqs)
            longest = _at_least(self.full_lengths, int(batch.seq_lens_np.max()))
            if size and longest:
                return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, longest)
        size = _at_least(self.piecewise_sizes, batch.num_tokens)
        return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size) if size else EAGER

    def run(self, descriptor: BatchExecutionDescriptor, batch: InputBatch) -> ForwardOutput:
        """Replay; hidden states of the batch's own tokens. They are valid until the next replay.

        PIECEWISE: within set_forward_context with the metadata of the batch.
        """
        if descriptor.mode is CUDAGraphMode.FULL:
            self.slots[: batch.num_reqs].copy_(batch.idx_mapping)
        self._pad(descriptor, batch.num_tokens)
        output = self.recorded[descriptor].replay(batch.num_tokens)
        if isinstance(output, Tensor):
            return output[: batch.num_tokens]
        # The next replay may come before these have been sent.
        return IntermediateTensors(
            {name: tensor[: batch.num_tokens].clone() for name, tensor in output.tensors.items()}
        )

    def _pad(self, descriptor: BatchExecutionDescriptor, num_tokens: int) -> None:
        """Make tokens of nobody of all that the batch does not fill."""
        rest = slice(num_tokens, descriptor.num_tokens)
        self.buffers.input_ids[rest].zero_()
        self.buffers.positions[rest].zero_()
        if descriptor.mode is CUDAGraphMode.FULL:
            self.slots[rest].fill_(self.block_tables.padding_slot)


def _up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """The sizes below `limit`, and `limit` itself unless it exceeds all of them."""
    below = [size for size in sizes if size < limit]
    return [*below, limit] if limit <= sizes[-1] else below


def _at_least(sizes: list[int], value: int) -> int:
    """The smallest size that is not below `value`; 0: none."""
    index = bisect.bisect_left(sizes, value)
    return sizes[index] if index < len(sizes) else 0
