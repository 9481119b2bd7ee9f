"""Exercise profile-first: a KV cache that is allocated before anyone knows what is left for it.

vLLM 0.25.1: vllm/v1/worker/gpu_worker.py (Worker.determine_available_memory), vllm/v1/engine/core.py (_initialize_kv_caches)
Articles: part 1 §8.3
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Out of memory at the first large batch: the KV cache was allocated too early",
    chapter=8,
    minutes=20,
    hints=(
        "What needs memory on the device besides weights and cache, and when does one know how much?",
        "Run the largest batch that will ever come (`model.profile_run`) before the cache exists. Its activations are gone "
        "when it returns, so what is free afterwards says nothing: `device.peak_bytes` does.",
        "Cache = budget × utilization − peak, rounded *down* to whole blocks; no block is a ValueError.",
    ),
)
