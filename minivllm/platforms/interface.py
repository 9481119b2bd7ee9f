"""The questions that a worker asks its platform.

vLLM 0.25.1: vllm/platforms/interface.py (Platform)
Articles: part 1 §4, §5
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of device.

    Attributes:
        device_type: "cpu" or "cuda".
        dist_backend: backend of the process groups that carry tensors of this device.
        worker_cls: qualified name of the class behind `worker_cls="auto"`.
    """

    device_type: ClassVar[str]
    dist_backend: ClassVar[str]
    worker_cls: ClassVar[str] = "minivllm.worker.gpu_worker.Worker"

    @abstractmethod
    def bind_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Make this process use the device of `local_rank`, and return it.

        Raises:
            ConfigError: there is no such device.
        """

    @abstractmethod
    def get_memory_info(self) -> tuple[int, int]:
        """Free and total memory of the bound device, in bytes."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything it was told to do."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Begin a new measurement for get_peak_memory."""

    @abstractmethod
    def get_peak_memory(self) -> int | None:
        """Highest number of bytes that torch had allocated since reset_peak_memory (None: not measured here)."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that torch holds in reserve back to the device."""
