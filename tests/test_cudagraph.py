"""What of CUDA graphs can be checked without CUDA: which shape serves which batch, and that padding changes nothing.

A recording is replaced by one that runs the same pass again, on the same padded buffers. That kernels can be recorded
and replayed is for tests/gpu.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import Driver, LocalWorker, make_config

from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint
from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.cudagraph_utils import (
    EAGER,
    BatchExecutionDescriptor,
    CudaGraphManager,
    CUDAGraphMode,
    _at_least,
    _up_to,
)

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class RunAgain:
    """In place of RecordedForward: the buffers are read by running the pass, not by replaying its kernels."""

    def __init__(self, manager: CudaGraphManager, descriptor: BatchExecutionDescriptor) -> None:
        self.manager, self.descriptor = manager, descriptor
        self.replayed = 0

    def replay(self, num_tokens: int) -> Any:
        self.replayed += 1
        if self.descriptor.mode is FULL:
            return self.manager.forward(self.descriptor, None)
        from minivllm.forward_context import get_forward_context, set_forward_context

        # The metadata of the batch is set around this, and the pass sets that of a recording.
        metadata = get_forward_context().attn_metadata

        def attend(layer: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            assert q.shape[0] == self.descriptor.num_tokens
            out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2])
            with set_forward_context(metadata):
                out[:num_tokens] = layer.attend(q[:num_tokens], kv[:num_tokens])
            set_again = set_forward_context(None, attend)
            set_again.__enter__()
            return out

        return self.manager.forward(self.descriptor, attend)


def record_all(manager: CudaGraphManager, modes: tuple[CUDAGraphMode, ...]) -> None:
    for size in manager.full_sizes if FULL in modes else ():
        for longest in manager.full_lengths:
            descriptor = BatchExecutionDescriptor(FULL, size, longest)
            manager.recorded[descriptor] = RunAgain(manager, descriptor)  # type: ignore[assignment]
    for size in manager.piecewise_sizes:
        descriptor = BatchExecutionDescriptor(PIECEWISE, size)
        manager.recorded[descriptor] = RunAgain(manager, descriptor)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("graphs") / "model", **PRESETS["qwen3-gqa2"])


def test_sizes() -> None:
    assert _up_to((1, 2, 4, 8), 1) == [1]
    assert _up_to((1, 2, 4, 8), 3) == [1, 2, 3]
    assert _up_to((1, 2, 4, 8), 8) == [1, 2, 4, 8]
    assert _up_to((1, 2, 4, 8), 100) == [1, 2, 4, 8]
    assert [_at_least([2, 4], n) for n in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 0]


@pytest.mark.parametrize("modes", [(FULL, PIECEWISE), (PIECEWISE,)])
def test_padding_changes_no_token(checkpoint: Path, modes: tuple[CUDAGraphMode, ...]) -> None:
    """Batches of 1 to 6 requests in shapes for 1, 2, 4 and 6, whose slots do not come in order."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randrange(1, 30))] for _ in range(14)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=3 + i % 9, ignore_eos=True)
        for i in range(14)
    ]

    def run(record: bool) -> tuple[list[list[int]], dict[BatchExecutionDescriptor, Any]]:
        worker = LocalWorker(make_config(str(checkpoint), max_num_seqs=6, max_num_batched_tokens=24), 300)
        try:
            manager = worker.worker.model_runner.cudagraph_manager
            assert manager.why_not == "a CPU has no graphs" and not manager.recorded
            if record:
                if FULL not in modes:
                    manager.full_sizes = []
                record_all(manager, modes)
            requests = Driver(worker, token_budget=24, preempt_at=(9, 17), reverse=True).generate(
                prompts, params
            )
            return [request.output for request in requests], dict(manager.recorded)
        finally:
            worker.close()

    eager, _ = run(record=False)
    graphs, recorded = run(record=True)
    assert graphs == eager
    used = {descriptor for descriptor, recording in recorded.items() if recording.replayed}
    assert {descriptor.mode for descriptor in used} == set(modes)
    if FULL in modes:
        assert {descriptor.num_tokens for descriptor in used if descriptor.mode is FULL} >= {1, 4, 6}


def test_what_is_larger_than_all_shapes_runs_eagerly(checkpoint: Path) -> None:
    worker = LocalWorker(make_config(str(checkpoint), max_num_seqs=6, max_num_batched_tokens=24), 300)
    try:
        manager = worker.worker.model_runner.cudagraph_manager
        record_all(manager, (FULL, PIECEWISE))

        class Batch:
            def __init__(self, num_tokens: int, num_reqs: int, longest: int) -> None:
                import numpy as np

                self.num_tokens, self.num_reqs, self.seq_lens_np = num_tokens, num_reqs, np.array([longest])

        def dispatch(*args: int) -> BatchExecutionDescriptor:
            return manager.dispatch(Batch(*args))  # type: ignore[arg-type]

        longest = manager.full_lengths[-1]
        assert dispatch(3, 3, 10) == BatchExecutionDescriptor(FULL, 4, manager.full_lengths[0])
        assert dispatch(3, 3, longest + 1) == BatchExecutionDescriptor(PIECEWISE, 8)
        assert dispatch(9, 3, 10) == BatchExecutionDescriptor(PIECEWISE, 16)
        assert dispatch(25, 3, 10) == EAGER
        assert str(EAGER) == "none: eager" and str(dispatch(9, 3, 10)) == "PIECEWISE of 16"
        manager.recorded.clear()
        assert dispatch(3, 3, 10) == EAGER
    finally:
        worker.close()
