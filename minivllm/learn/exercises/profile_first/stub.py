"""Out of memory at the first large batch: the KV cache was allocated too early.

A device has so many bytes. Weights take some for good; a forward pass takes some for its activations and gives them
back; everything else may become KV cache, in whole blocks, up to the share `utilization` of the device that this process
may use. The function below makes a model ready to run.

Change it so that the largest batch never runs out of memory and the cache is as large as that allows.

vLLM 0.25.1: vllm/v1/worker/gpu_worker.py (Worker.determine_available_memory), vllm/v1/engine/core.py (_initialize_kv_caches)
Articles: part 1 §8.3
"""

from typing import Protocol


class Device(Protocol):
    """Memory of fixed size that counts who takes how much.

    Attributes:
        total_bytes: the size of the device.
        used_bytes: taken at this moment.
        peak_bytes: the most that was ever taken.
    """

    total_bytes: int
    used_bytes: int
    peak_bytes: int

    def allocate(self, size_bytes: int, what: str) -> None:
        """Take memory for good. Raises MemoryError when there is not enough."""


class Model(Protocol):
    """A model that is not loaded yet.

    Attributes:
        block_bytes: size of one block of its KV cache, all layers together.
    """

    block_bytes: int

    def load_weights(self, device: Device) -> None: ...
    def profile_run(self, device: Device) -> None:
        """One forward pass with the largest batch that there will be; its activations are given back at the end."""


def prepare(model: Model, device: Device, utilization: float) -> int:
    """Load the model, allocate its KV cache, and return the number of blocks.

    Raises:
        ValueError: nothing is left for the cache.
    """
    model.load_weights(device)
    free_bytes = device.total_bytes * utilization - device.used_bytes
    num_blocks = round(free_bytes / model.block_bytes)
    device.allocate(num_blocks * model.block_bytes, "KV cache")
    model.profile_run(device)
    return num_blocks
