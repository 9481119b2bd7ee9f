"""A worker without a model that can do what bench_rpc_channels.py asks of every channel."""

from __future__ import annotations

from bench_rpc_channels import Stub
from workers import LightWorker


class StubWorker(Stub, LightWorker):
    """echo, swallow and produce; the rest is a light worker's."""
