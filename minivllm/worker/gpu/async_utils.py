"""The result of a step, on its way from the device to the CPU.

vLLM 0.25.1: vllm/v1/worker/gpu/async_utils.py (AsyncOutput)
Articles: part 2 §2.4.10
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from minivllm.worker.gpu.sample.output import LogprobsTensors, SamplerOutput


class AsyncOutput(AsyncModelRunnerOutput):
    """Starts the copies when it is made and waits for them in get_output; on a CPU there is nothing to wait for.

    Args:
        req_ids: requests in the order of the batch.
        is_sampled: `[num_reqs]`; rows whose prompt is not done yet give no token.
        logprobs: request → its rows.
        prompt_logprobs: request → its rows, for requests whose prompt ended in this step.
        copy_stream: where the copies run, so that the next step's kernels need not wait for them (CUDA).
    """

    def __init__(
        self,
        req_ids: list[str],
        is_sampled: np.ndarray | None,
        sampler_output: SamplerOutput,
        prompt_logprobs: dict[str, LogprobsTensors],
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self.req_ids = req_ids
        self.is_sampled = is_sampled
        self.event: torch.cuda.Event | None = None
        token_ids = sampler_output.token_ids
        self.has_several = token_ids is not None
        self.sampled = sampler_output.sampled_token_ids if token_ids is None else token_ids
        self.logprobs = sampler_output.logprobs
        self.prompt_logprobs = prompt_logprobs
        if copy_stream is not None:
            copy_stream.wait_stream(torch.cuda.current_stream(self.sampled.device))
            with torch.cuda.stream(copy_stream):
                self.sampled = _to_cpu(self.sampled)
                self.logprobs = {r: t.map(_to_cpu) for r, t in self.logprobs.items()}
                self.prompt_logprobs = {r: t.map(_to_cpu) for r, t in prompt_logprobs.items()}
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        if self.event is not None:
            self.event.synchronize()
        tokens = self.sampled.tolist()
        if self.has_several:
            tokens = [[token for token in row if token >= 0] for row in tokens]
            each = [True] * len(tokens) if self.is_sampled is None else self.is_sampled.tolist()
            sampled = [row if s else [] for row, s in zip(tokens, each, strict=True)]
        elif self.is_sampled is None:
            sampled = [[token] for token in tokens]
        else:
            sampled = [[t] if s else [] for t, s in zip(tokens, self.is_sampled.tolist(), strict=True)]
        return ModelRunnerOutput(
            self.req_ids,
            sampled,
            {req_id: _to_lists(tensors) for req_id, tensors in self.logprobs.items()},
            {req_id: _to_lists(tensors) for req_id, tensors in self.prompt_logprobs.items()},
        )


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for AsyncOutput's copies; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _to_cpu(tensor: Tensor) -> Tensor:
    # The copy reads memory that the main stream may hand out again once it thinks the tensor is dead.
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.to("cpu", non_blocking=True)


def _to_lists(tensors: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist())
