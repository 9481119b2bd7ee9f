"""Block pool, block lists of requests, and the number of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, VllmConfig
from minivllm.core.block_pool import NULL_BLOCK_ID, BlockPool
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.kv_cache_utils import get_kv_cache_configs
from minivllm.core.request import Request
from minivllm.exceptions import ConfigError
from minivllm.kv_cache_interface import FullAttentionSpec
from minivllm.sampling_params import SamplingParams


def request(name: str, num_tokens: int) -> Request:
    return Request(name, list(range(num_tokens)), SamplingParams(), 16)


def test_the_null_block_is_never_handed_out() -> None:
    """Invariant 2."""
    pool = BlockPool(5)
    assert NULL_BLOCK_ID not in pool.get_new_blocks(4)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.get_new_blocks(1)


def test_a_block_cannot_be_freed_twice() -> None:
    """Invariant 1."""
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.free_blocks(blocks[:1])
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.free_blocks([NULL_BLOCK_ID])


def test_allocate_slots_gives_all_or_nothing() -> None:
    manager = KVCacheManager(num_gpu_blocks=4, block_size=4)
    a, b = request("a", 9), request("b", 8)
    first = manager.allocate_slots(a, 5)
    assert first is not None and len(first) == 2
    a.num_computed_tokens = 5
    assert manager.allocate_slots(a, 3) == []
    assert manager.allocate_slots(b, 8) is None
    assert "b" not in manager.req_to_blocks
    manager.check_invariants()
    assert len(manager.get_block_ids("a")) == 2
    manager.free(a)
    manager.free(a)
    assert manager.block_pool.get_num_free_blocks() == 3


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(2, 30),
    block_size=st.integers(1, 8),
    operations=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=60),
)
def test_books_balance(num_blocks: int, block_size: int, operations: list[tuple[int, int]]) -> None:
    """Invariant 3: arbitrary growth and release of five requests."""
    manager = KVCacheManager(num_blocks, block_size)
    requests = [request(f"r{i}", 1) for i in range(5)]
    for index, num_tokens in operations:
        if num_tokens == 0:
            manager.free(requests[index])
            requests[index].num_computed_tokens = 0
        elif manager.allocate_slots(requests[index], num_tokens) is not None:
            requests[index].num_computed_tokens += num_tokens
        manager.check_invariants()
        for r in requests:
            assert len(manager.get_block_ids(r.request_id)) == manager.blocks_needed(r.num_computed_tokens)


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")


def test_the_rank_with_the_least_memory_decides() -> None:
    config = VllmConfig()
    page = SPEC.page_size_bytes
    specs = [{"l0": SPEC, "l1": SPEC}, {"l2": SPEC}]
    configs = get_kv_cache_configs(config, specs, [page * 20, page * 7])
    assert [c.num_blocks for c in configs] == [7, 7]
    assert config.cache_config.num_gpu_blocks == 7
    assert list(configs[1].kv_cache_specs) == ["l2"]
    assert configs[0].total_bytes == 2 * 7 * page


def test_the_override_wins() -> None:
    config = VllmConfig(cache_config=CacheConfig(num_gpu_blocks_override=11))
    assert get_kv_cache_configs(config, [{"l0": SPEC}], [0])[0].num_blocks == 11


def test_too_little_memory_says_which_rank_and_how_much() -> None:
    with pytest.raises(ConfigError, match=rf"rank 1 has 10 bytes.*{2 * SPEC.page_size_bytes}"):
        get_kv_cache_configs(VllmConfig(), [{"l0": SPEC}, {"l0": SPEC}], [1 << 20, 10])
