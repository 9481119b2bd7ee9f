"""Drop tokens that are unlikely next to the most likely one.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/min_p.py (apply_min_p)
Articles: part 1 §8.2
"""

from __future__ import annotations

from torch import Tensor


def apply_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Set logits of tokens less likely than min_p times the most likely one to -inf, in place.

    Args:
        logits: `[n, vocab_size]`.
        min_p: `[n]`; 0 drops nothing.
    """
    # p / p_max = exp(logit - logit_max), and log(0) = -inf is below every logit.
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log().view(-1, 1)
    logits.masked_fill_(logits < threshold, float("-inf"))
