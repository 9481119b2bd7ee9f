"""The stub worker under minivllm."""

from __future__ import annotations

import os

from methods import Methods

from minivllm.worker.worker_base import WorkerBase


class StubWorker(Methods, WorkerBase):
    def init_device(self) -> None:
        if self.rank == 1 and "STUB_FAILS" in os.environ:
            raise ValueError("no such weights")

    def load_model(self) -> None:
        return None
