"""The configuration of one engine, checked before any process starts.

vLLM 0.25.1: vllm/config/
Articles: part 1 §6, part 2 §2.3.1
"""

from minivllm.config.cache import CacheConfig
from minivllm.config.model import BUNDLED_CHECKPOINT, SUPPORTED_ARCHITECTURES, ModelConfig
from minivllm.config.observability import TRACE_LEVELS, ObservabilityConfig
from minivllm.config.parallel import ParallelConfig
from minivllm.config.scheduler import SchedulerConfig
from minivllm.config.speculative import SpeculativeConfig
from minivllm.config.vllm import VllmConfig

__all__ = [
    "BUNDLED_CHECKPOINT",
    "SUPPORTED_ARCHITECTURES",
    "TRACE_LEVELS",
    "CacheConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "VllmConfig",
]
