"""Arithmetic with stretches of time: what they cover together, where two sets of them overlap.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches, sorted and joined where they touch."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> int:
    """Length of what they cover together."""
    return sum(end - start for start, end in union(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> int:
    """Length of what is covered by both."""
    first, second = union(a), union(b)
    return total(first) + total(second) - total([*first, *second])


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The stretches between them."""
    return [(a[1], b[0]) for a, b in pairwise(union(intervals))]


def span_of(intervals: Sequence[Interval]) -> int:
    """From the first start to the last end."""
    return max(end for _, end in intervals) - min(start for start, _ in intervals) if intervals else 0
