"""Log-probabilities of chosen tokens and their rivals.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/logprob.py (compute_topk_logprobs)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.worker.gpu.sample.output import LogprobsTensors


def compute_topk_logprobs(logits: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Log-probabilities of the given tokens and of the `num_logprobs` most likely ones.

    Args:
        logits: `[n, vocab_size]` as the model gave them, before penalties and temperature.
        token_ids: `[n]` the chosen tokens.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen = token_ids.view(-1, 1)
    chosen_logprobs = logprobs.gather(1, chosen)
    ranks = (logprobs >= chosen_logprobs).sum(dim=-1)
    if num_logprobs:
        top_logprobs, top_ids = logprobs.topk(min(num_logprobs, logprobs.shape[-1]), dim=-1)
        return LogprobsTensors(
            torch.cat((chosen, top_ids), dim=1), torch.cat((chosen_logprobs, top_logprobs), dim=1), ranks
        )
    return LogprobsTensors(chosen, chosen_logprobs, ranks)
