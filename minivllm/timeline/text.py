"""Words for times, sizes and lists, the same in every view.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


def unit_for(span_ns: float) -> tuple[int, str]:
    """The unit (nanoseconds, symbol) in which a stretch of `span_ns` reads best on an axis."""
    for size_ns, symbol in _UNITS:
        if span_ns >= 2 * size_ns:
            return size_ns, symbol
    return _UNITS[-1]


def duration(ns: float) -> str:
    """Three significant digits with the fitting unit: `4.21 µs`, `38.0 ms`, `1.24 s`, `2 min 05 s`."""
    if ns < 0:
        return "-" + duration(-ns)
    # Rounded first: 999.96 ms must become 1.00 s, not 1000 ms.
    if ns >= 119_500_000_000:
        minutes, seconds = divmod(round(ns / 1e9), 60)
        return f"{minutes} min {seconds:02d} s"
    for size_ns, symbol in _UNITS:
        if ns >= size_ns * 0.9995:
            value = ns / size_ns
            if size_ns == 1:
                return f"{value:.0f} ns"
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {symbol}"
    return "0 ns" if ns == 0 else "<1 ns"


def instant(ns: float, digits_s: int = 2) -> str:
    """A point in time on the run's clock, in seconds: `0.31 s`."""
    return f"{ns / 1e9:.{digits_s}f} s"


def instants(values_ns: Sequence[float]) -> list[str]:
    """Points in time with as many digits as it takes to tell neighbours apart (two to six)."""
    ordered = sorted(set(values_ns))
    gaps = [b - a for a, b in pairwise(ordered)]
    smallest = min(gaps, default=1e9)
    digits = 2
    while digits < 6 and smallest < 10 ** (9 - digits):
        digits += 1
    return [instant(value, digits) for value in values_ns]


def size(num_bytes: float) -> str:
    """`612 B`, `1.5 KiB`, `24.0 MiB`."""
    value = float(num_bytes)
    for symbol in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or symbol == "GiB":
            return f"{value:.0f} B" if symbol == "B" else f"{value:.1f} {symbol}"
        value /= 1024
    raise AssertionError("unreachable")


def count(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def every(n: int, noun: str) -> str:
    """`the worker`, `both workers`, `all 3 workers`."""
    return f"the {noun}" if n == 1 else f"both {noun}s" if n == 2 else f"all {n:,} {noun}s"


def listing(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    items = list(items)
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def fate(ended: str) -> str:
    """How a process ended, short enough for the right edge: `exit code 0`, `killed: SIGKILL`, `ended: SIGTERM`."""
    for long, short in (
        ("exited with code ", "exit code "),
        ("was killed by ", "killed: "),
        ("ended after ", "ended: "),
    ):
        if ended.startswith(long):
            return short + ended.removeprefix(long).partition(" (")[0]
    return ended


def ranks(numbers: Sequence[int]) -> str:
    """`rank 0`, `ranks 0 and 1`, `ranks 0, 1 and 2`; eight or more in a row become `ranks 0 to 7`."""
    ordered = sorted(numbers)
    if len(ordered) > 3 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return ("rank " if len(ordered) == 1 else "ranks ") + listing([str(n) for n in ordered])
