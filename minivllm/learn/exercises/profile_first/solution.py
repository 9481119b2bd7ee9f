"""Profile first: only the peak of the largest batch says what is left for the cache.

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
    model.profile_run(device)
    # The peak holds the weights and the activations; what is free now would count the latter as free.
    left_bytes = int(device.total_bytes * utilization) - device.peak_bytes
    num_blocks = left_bytes // model.block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"weights and the largest batch need {device.peak_bytes:,} bytes, which leaves {left_bytes:,} for the "
            f"KV cache; a block has {model.block_bytes:,}"
        )
    device.allocate(num_blocks * model.block_bytes, "KV cache")
    return num_blocks
