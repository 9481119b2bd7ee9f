"""Tensors that the CPU writes and the device reads, without stopping either.

vLLM 0.25.1: vllm/v1/worker/gpu/buffer_utils.py (UvaBackedTensor, StagedWriteTensor, async_copy_to_gpu)
Articles: part 1 §7

On a CPU `np` and `gpu` are the same memory and the copies cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def async_copy_to_gpu(x: np.ndarray, device: torch.device) -> Tensor:
    """`x` on the device; on CUDA through pinned memory, so that the CPU need not wait for the copy."""
    tensor = torch.from_numpy(x)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def zeros(size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU its memory is taken when it is first written."""
    if device.type == "cpu":
        # torch.zeros writes to every page. Large tables, of which few rows are used, would cost real memory.
        return torch.from_numpy(np.zeros(size, dtype=torch.empty(0, dtype=dtype).numpy().dtype))
    return torch.zeros(size, dtype=dtype, device=device)


class UvaBackedTensor:
    """A small table with one entry per slot, written on the CPU as `np` and read on the device as `gpu`.

    Deviation from vLLM: torch cannot map pinned host memory into a GPU's address space (UVA) without an extension
    module, so that copy_to_uva copies the table.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.np: np.ndarray = self.cpu.numpy()
        self.device = device
        self.gpu = self.cpu.to(device)

    def copy_to_uva(self) -> None:
        """Show the device what was written since the last call."""
        if self.device.type != "cpu":
            # A fresh pinned copy: the table may be written again while this copy is still on its way.
            self.gpu.copy_(self.cpu.clone().pin_memory(), non_blocking=True)


class StagedWriteTensor:
    """A table on the device into which the CPU writes short runs: collected first, then written by one operation.

    Attributes:
        gpu: the table, one row per slot.
        flat: the same memory in one dimension.
    """

    def __init__(self, size: int | tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.gpu = zeros(size, dtype, device)
        self.flat = self.gpu.view(-1)
        self.row_size = 1 if isinstance(size, int) else size[1]
        self._starts: list[int] = []
        self._contents: list[Sequence[int]] = []

    def stage_write(self, index: int, start: int, x: Sequence[int]) -> None:
        """Remember to write `x` to row `index` from column `start` on. Runs of one step must not overlap."""
        if x:
            self._starts.append(index * self.row_size + start)
            self._contents.append(x)

    def stage_write_elem(self, index: int, x: int) -> None:
        """Remember to write `x` to the first column of row `index`."""
        self.stage_write(index, 0, (x,))

    def apply_write(self) -> None:
        """Do what was remembered."""
        if not self._starts:
            return
        runs = [
            np.arange(start, start + len(x)) for start, x in zip(self._starts, self._contents, strict=True)
        ]
        where = async_copy_to_gpu(np.concatenate(runs), self.device)
        contents = np.fromiter((value for x in self._contents for value in x), np.int64, where.numel())
        self.flat.index_copy_(0, where, async_copy_to_gpu(contents, self.device).to(self.gpu.dtype))
        self._starts.clear()
        self._contents.clear()
