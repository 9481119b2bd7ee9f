"""Platforms: what differs between a CPU and a CUDA GPU, in one place each.

vLLM 0.25.1: vllm/platforms/__init__.py (current_platform)
Articles: part 1 §4, §5

No torch at module level: the client asks for the device and for the worker class before any worker exists.
"""

from __future__ import annotations

import functools

from minivllm.exceptions import ConfigError
from minivllm.platforms.interface import Platform

__all__ = ["Platform", "get_platform", "resolve_device"]


@functools.cache
def get_platform(device: str) -> Platform:
    """The platform of a device type, "cpu" or "cuda"."""
    # Deviation from vLLM: the platform follows from the configuration and is not probed at import, so that a host
    # with a GPU can run the CPU path, too.
    if device == "cpu":
        from minivllm.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device == "cuda":
        from minivllm.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise ConfigError(f"device={device!r} is not supported; use cpu or cuda")


def resolve_device(device: str) -> str:
    """Turn "auto" into "cuda" when torch is a CUDA build and a GPU answers, else into "cpu".

    Raises:
        ConfigError: "cuda" is asked for and cannot be had; the text says why.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported; use auto, cpu or cuda")
    if device == "cpu":
        return "cpu"
    from minivllm.platforms.cuda import why_no_cuda

    reason = why_no_cuda()
    if reason is None:
        return "cuda"
    if device == "cuda":
        raise ConfigError(f"device='cuda' cannot be used: {reason}")
    return "cpu"
