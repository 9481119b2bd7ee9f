"""Random choice by noise that depends on seed, position and token alone.

vLLM 0.25.1: vllm/v1/worker/gpu/sample/gumbel.py (gumbel_sample, apply_temperature)
Articles: part 1 §8.2

Adding Gumbel noise to logits and taking the largest draws a token with the probability that softmax gives it. The
noise of a token is a hash of (seed of the request, position, token): a request's tokens do not depend on what else is
in the batch, on the order of the batch, or on how often the request was preempted, and all ranks draw the same token
without talking to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea, Flood 2014) as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_SPREAD = 0xD1B54A32D192ED03 - (1 << 64)


def _shift_xor_(z: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers with their sign; the mask makes a logical shift of it.
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64, in place: every bit of the result depends on every bit of `z`."""
    _shift_xor_(z, 30).mul_(_MIX_1)
    _shift_xor_(z, 27).mul_(_MIX_2)
    return _shift_xor_(z, 31)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, `[n, vocab_size]` float32.

    Args:
        seeds: `[n]` int64.
        positions: `[n]` int64; position of the token to be drawn.
    """
    key = _mix_(_mix_(seeds * _GOLDEN + 1) + positions * _SPREAD)
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device) * _GOLDEN
    bits = _mix_(key.view(-1, 1) + tokens)
    # 24 bits are what a float32 in [0, 1) can hold exactly; the half keeps both ends out, where a log is infinite.
    uniform = (bits >> 40).bitwise_and_((1 << 24) - 1).to(torch.float32).add_(0.5).mul_(2.0**-24)
    # In the last interval 1 - 2**-25 is rounded to 1, whose noise would be infinite.
    return uniform.clamp_(max=1 - 2.0**-24).log_().neg_().log_().neg_()


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row, `[n]` int64; rows of temperature 0 get their most likely token.

    Args:
        logits: `[n, vocab_size]`, divided by the temperature already; overwritten.
        temperature: `[n]`.
    """
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    return greedy_sample(logits.add_(noise.mul_((temperature > 0).view(-1, 1))))


def greedy_sample(logits: Tensor) -> Tensor:
    """The most likely token of each row, `[n]` int64; of equals the first.

    Args:
        logits: `[n, vocab_size]` float32.
    """
    if logits.device.type == "cpu":
        # The same answer in a sixth of the time: torch compares one element after the other here.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
