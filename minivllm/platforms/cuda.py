"""A CUDA GPU as the device: one per rank.

vLLM 0.25.1: vllm/platforms/cuda.py (CudaPlatform)
Articles: part 1 §4, §5
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from minivllm.exceptions import ConfigError
from minivllm.platforms.interface import Platform

if TYPE_CHECKING:
    import torch


def why_no_cuda() -> str | None:
    """Why CUDA cannot be used, or None when it can; without importing torch, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = Path(spec.origin).with_name("version.py")
    try:
        match = re.search(r"^cuda\b[^=]*=\s*(.+)$", version.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as e:
        return f"{version} cannot be read: {e}"
    if match is None or match[1].strip() == "None":
        return "the installed torch is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    # Asking the driver would initialise it, and a child made by fork could not use CUDA afterwards.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return "there is no GPU (no /dev/nvidia*)"
    return None


class CudaPlatform(Platform):
    device_type: ClassVar[str] = "cuda"
    dist_backend: ClassVar[str] = "nccl"

    def bind_device(self, local_rank: int, local_world_size: int) -> torch.device:
        import torch

        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"local rank {local_rank} of {local_world_size} needs a GPU of its own, but {count} can be seen; "
                "lower tensor_parallel_size or look at CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def get_memory_info(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def get_peak_memory(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated()

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()
