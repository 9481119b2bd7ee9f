"""Every lifecycle step that a run shows, by name: the contract between code, tests, docs, failpoints and traces.

vLLM 0.25.1: vllm/tracing/ (names of its own start-up spans)
Articles: part 1 §1–§9, part 2 §2–§4
"""

from __future__ import annotations

from minivllm.tracing.catalogue_rows import ROWS
from minivllm.tracing.spec import LEVEL_NAMES, LIFECYCLE, MESSAGE, RPC, SpanSpec

__all__ = ["BY_INDEX", "LEVEL_NAMES", "LIFECYCLE", "MESSAGE", "RPC", "SPANS", "SpanSpec", "spec"]

SPANS: dict[str, SpanSpec] = {row.name: row for row in ROWS}
BY_INDEX: tuple[SpanSpec, ...] = tuple(SPANS.values())


def spec(name: str) -> SpanSpec:
    """Return the catalogue entry of a span.

    Raises:
        KeyError: the name is not in the catalogue.
    """
    try:
        return SPANS[name]
    except KeyError:
        raise KeyError(f"{name!r} is not in the span catalogue (minivllm spans lists it)") from None
