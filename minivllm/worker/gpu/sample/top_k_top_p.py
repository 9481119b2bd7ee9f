"""Keep the most likely tokens only.

vLLM 0.25.1: vllm/v1/sample/ops/topk_topp_sampler.py (apply_top_k_top_p)
Articles: part 1 §8.2
"""

from __future__ import annotations

from torch import Tensor


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Set the logits of all other tokens to -inf, in place; first by number, then by probability of what is left.

    Args:
        logits: `[n, vocab_size]`.
        top_k: `[n]` number of tokens to keep, 1 to vocab_size; None keeps all.
        top_p: `[n]` the kept tokens are the fewest that together have this probability; None keeps all.
    """
    if top_k is None and top_p is None:
        return
    ordered, index = logits.sort(dim=-1, stable=True)
    if top_k is not None:
        threshold = ordered.gather(1, (ordered.shape[-1] - top_k.long()).view(-1, 1))
        ordered.masked_fill_(ordered < threshold, float("-inf"))
    if top_p is not None:
        # Ascending, so that a token is dropped when it and all less likely ones together have at most 1 - top_p.
        drop = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p).view(-1, 1)
        drop[:, -1] = False
        ordered.masked_fill_(drop, float("-inf"))
    logits.scatter_(1, index, ordered)
