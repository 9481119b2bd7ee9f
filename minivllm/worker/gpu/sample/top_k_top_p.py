"""Keep the most likely tokens only.

vLLM 0.25.1: vllm/v1/sample/ops/topk_topp_sampler.py (apply_top_k_top_p)
Articles: part 1 §8.2
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CANDIDATES = 128


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, max_top_k: int) -> None:
    """Set the logits of all other tokens to -inf, in place; first by number, then by probability of what is left.

    Deviation from vLLM: the rows are not sorted as a whole, which for a large vocabulary takes longer than a forward
    pass; a threshold is found among the largest logits. Tokens that equal it are kept, so that the result does not
    depend on how many were looked at for the sake of other rows.

    Args:
        logits: `[n, vocab_size]`.
        top_k: `[n]` number of tokens to keep, 1 to vocab_size; None keeps all.
        top_p: `[n]` the kept tokens are the fewest that together have this probability, 1 keeps all; None likewise.
        max_top_k: the largest entry of top_k; the vocabulary's size when top_k is None.
    """
    if top_k is None and top_p is None:
        return
    if top_k is not None:
        largest = logits.topk(max_top_k, dim=-1).values
        threshold = largest.gather(1, (top_k.long() - 1).view(-1, 1))
        logits.masked_fill_(logits < threshold, float("-inf"))
    if top_p is not None:
        logits.masked_fill_(logits < _top_p_threshold(logits, top_p.view(-1, 1), max_top_k), float("-inf"))


def _top_p_threshold(logits: Tensor, top_p: Tensor, max_candidates: int) -> Tensor:
    """`[n, 1]` the smallest logit among the fewest that have probability top_p; -inf where top_p is 1."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    limited = top_p < 1
    # A GPU would have to be waited for to learn whether the first few are enough.
    count = min(_FIRST_CANDIDATES, max_candidates) if logits.device.type == "cpu" else max_candidates
    while True:
        largest = logits.topk(count, dim=-1).values
        probabilities = (largest - total).exp_()
        before = probabilities.cumsum(dim=-1).sub_(probabilities)
        kept = (before < top_p).logical_and_(limited)
        if count == max_candidates or not kept[:, -1].any():
            break
        count = min(count * 8, max_candidates)
    lowest = largest.gather(1, (kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0))
    return torch.where(limited, lowest, float("-inf"))
