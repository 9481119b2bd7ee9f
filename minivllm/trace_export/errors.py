"""What can go wrong when a trace is sent somewhere.

vLLM 0.25.1: none
Articles: –
"""

from __future__ import annotations


class ExportError(RuntimeError):
    """The endpoint did not take the trace; the text says why and what to do. Nothing is lost: the files stay."""
