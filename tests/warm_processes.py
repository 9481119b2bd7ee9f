"""Processes that have torch already: forked from a server that imported it once, instead of spawned to import it.

For tests about what several ranks compute. How an engine's processes start is what other tests are about; those spawn
theirs, as users do.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext

import pytest

# What a process of pytest's imports anyway, and what a worker needs.
PRELOADED = ["pytest", "minivllm.worker.gpu_worker", "minivllm.worker.gpu.model_runner"]


def context() -> ForkServerContext:
    """Starts the server at its first call; `stop` ends it."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    # What a test has set is not for the processes of all others.
    settings = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith("MINIVLLM_") and not name.startswith("MINIVLLM_TEST_")
    }
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update(settings)
    return multiprocessing.get_context("forkserver")


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of this process start such workers; the variables of minivllm reach them, others do not."""
    context()
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    monkeypatch.setenv("MINIVLLM_WORKER_MULTIPROC_METHOD", "forkserver")


def stop() -> None:
    """End the server, if there is one, and remove the directory that its socket was in."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    util._run_finalizers()  # type: ignore[attr-defined]
