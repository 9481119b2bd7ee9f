"""Process groups and collectives through shared memory, between real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runner_harness import SpawnedWorkers, rendezvous

from minivllm.distributed.parallel_state import get_pp_indices

SHM = Path("/dev/shm")
pytestmark = pytest.mark.timeout(120)


def join(rank: int, worker: Any, size: int, method: str, tp: int | None = None) -> dict[str, Any]:
    import torch

    from minivllm.distributed import parallel_state

    parallel_state.init_distributed_environment(size, rank, method, torch.device("cpu"), "gloo")
    parallel_state.initialize_model_parallel(tp or size, size // (tp or size))
    groups = {
        "tp": parallel_state.get_tp_group(),
        "pp": parallel_state.get_pp_group(),
        "world": parallel_state.get_world_group(),
    }
    communicator = groups["tp"].cpu_communicator
    return {
        "ranks": {name: group.ranks for name, group in groups.items()},
        "flags": {name: (group.is_first_rank, group.is_last_rank) for name, group in groups.items()},
        "transport": communicator.transport if communicator else "none",
        "pid": os.getpid(),
    }


def leave(rank: int, worker: Any) -> None:
    from minivllm.distributed import parallel_state

    # Twice: a worker may be shut down by its executor and by its own exit.
    for _ in range(2):
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def stress(rank: int, worker: Any, rounds: int) -> str:
    """Random shapes, dtypes and pauses; each result must equal gloo's, and have the same bits on all ranks."""
    import hashlib
    import random

    import torch
    import torch.distributed as dist

    from minivllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    shared, own = random.Random(7), random.Random(rank)
    generator = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()
    with torch.inference_mode():
        for number in range(rounds):
            shape = (shared.choice([1, 2, 8, 33]), shared.choice([1, 128, 250, 4096]))
            if number % 100 == 50:
                shape = (700, 512)  # more than a buffer holds: goes through gloo
            dtype = shared.choice([torch.float32, torch.bfloat16, torch.float16])
            x = torch.randn(shape, generator=generator).to(dtype)
            parts = [torch.empty_like(x) for _ in range(group.world_size)]
            dist.all_gather(parts, x, group=group.cpu_group)
            if own.random() < 0.05:
                time.sleep(own.random() * 0.01)
            if shared.random() < 0.5:
                result = group.all_reduce(x.clone())
                expected = parts[0].clone()
                for part in parts[1:]:
                    expected += part
                close = torch.allclose(result.float(), expected.float(), rtol=1e-2, atol=1e-2)
                assert close if shape == (700, 512) else torch.equal(result, expected), (number, shape, dtype)
            else:
                result = group.all_gather(x, -1)
                assert torch.equal(result, torch.cat(parts, -1)), (number, shape, dtype)
            digest.update(result.float().numpy().tobytes())
    return digest.hexdigest()


def count_reduces(rank: int, worker: Any, rounds: int) -> float:
    """Reduces without any other synchronisation between them; returns the microseconds each took."""
    import torch

    from minivllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    start = time.perf_counter()
    with torch.inference_mode():
        for number in range(rounds):
            x = torch.full((2, 128), float(rank + number))
            total = sum(r + number for r in range(group.world_size))
            assert group.all_reduce(x).eq(total).all(), number
    return (time.perf_counter() - start) / rounds * 1e6


def fail_in(seconds: float, rank: int, worker: Any) -> tuple[float, str]:
    """Wait in an all-reduce that cannot finish; returns how long it took to fail, and the error."""
    import torch

    from minivllm.distributed import parallel_state
    from minivllm.distributed.cpu_communicator import CollectiveError

    group = parallel_state.get_tp_group()
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(4))
    except CollectiveError as e:
        message = str(e)
        took = time.monotonic() - start
        with pytest.raises(CollectiveError):
            group.all_reduce(torch.ones(4))
        return took, message
    raise AssertionError("the collective finished")


def wait_for_nobody(rank: int, worker: Any) -> tuple[float, str]:
    if rank == 1:
        time.sleep(60)
    return fail_in(60, rank, worker)


def abort_or_wait(rank: int, worker: Any) -> tuple[float, str]:
    from minivllm.distributed import parallel_state

    if rank == 1:
        time.sleep(0.3)
        parallel_state.get_tp_group().abort()
    return fail_in(60, rank, worker)


def come_late(rank: int, worker: Any) -> tuple[float, str]:
    if rank == 1:
        time.sleep(3)
    return fail_in(60, rank, worker)


def bring_other_size(rank: int, worker: Any) -> str:
    import torch

    from minivllm.distributed import parallel_state
    from minivllm.distributed.cpu_communicator import CollectiveError

    with pytest.raises(CollectiveError) as info:
        parallel_state.get_tp_group().all_reduce(torch.ones(4 + rank))
    return str(info.value)


def set_timeout(rank: int, worker: Any, seconds: float) -> None:
    from minivllm.distributed import parallel_state

    communicator = parallel_state.get_tp_group().cpu_communicator
    assert communicator is not None
    communicator.timeout_s = seconds


def objects(rank: int, worker: Any) -> Any:
    from minivllm.distributed import parallel_state

    parallel_state.get_world_group().barrier()
    return parallel_state.get_tp_group().broadcast_object({"from": rank}, src=1)


@pytest.fixture(scope="module")
def four() -> Iterator[SpawnedWorkers]:
    workers = SpawnedWorkers(4)
    yield workers
    workers.close()


@pytest.fixture
def two() -> Iterator[SpawnedWorkers]:
    workers = SpawnedWorkers(2)
    yield workers
    workers.close()


def segments_of(pids: list[int]) -> list[str]:
    return [f.name for f in SHM.glob("minivllm-*") if any(f"-{pid}-" in f.name for pid in pids)]


def timer_slacks(rank: int, worker: Any) -> dict[str, set[int]]:
    """Nanoseconds by which the kernel may wake threads late: of those of gloo that look at a flag, and of this one."""
    slacks: dict[str, set[int]] = {"gloo": set(), "main": {int(Path("/proc/self/timerslack_ns").read_text())}}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("gloo"):
            slacks["gloo"].add(int(Path(f"/proc/{task.name}/timerslack_ns").read_text()))
    return slacks


def test_groups_of_tp2_pp2(four: SpawnedWorkers) -> None:
    before = four.call(timer_slacks)
    replies = four.call(join, 4, rendezvous(), 2)
    # An idle engine lets its core sleep, and this thread is as punctual as it was.
    assert four.call(timer_slacks) == [slacks | {"gloo": {20_000_000}} for slacks in before]
    assert [r["ranks"]["tp"] for r in replies] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["ranks"]["pp"] for r in replies] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {tuple(r["ranks"]["world"]) for r in replies} == {(0, 1, 2, 3)}
    assert [r["flags"]["pp"] for r in replies] == [(True, False)] * 2 + [(False, True)] * 2
    four.call(leave)


def test_four_ranks_agree_with_gloo(four: SpawnedWorkers) -> None:
    replies = four.call(join, 4, rendezvous())
    assert {r["transport"] for r in replies} == {"shared memory"}
    assert segments_of([r["pid"] for r in replies]) == []
    assert len(set(four.call(stress, 300))) == 1
    four.call(count_reduces, 2000)
    assert four.call(objects) == [{"from": 1}] * 4
    four.call(leave)


def limit_files(rank: int, worker: Any, limit: int) -> None:
    """No file of this process may grow beyond `limit` bytes (-1: no limit); /dev/shm is then too small."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if limit < 0 else limit, hard))


def test_without_shared_memory_gloo_does_it(four: SpawnedWorkers) -> None:
    """The segment cannot be reserved: all ranks agree on gloo, and the reason is kept."""
    four.call(limit_files, 1 << 20)
    replies = four.call(join, 4, rendezvous())
    assert replies[0]["transport"].startswith("gloo: /dev/shm/minivllm-")
    assert replies[0]["transport"].endswith("cannot be reserved: File too large")
    assert {r["transport"] for r in replies[1:]} == {"gloo: the ranks share no memory"}
    four.call(count_reduces, 20)
    assert segments_of([r["pid"] for r in replies]) == []
    four.call(leave)
    four.call(limit_files, -1)


def test_two_ranks_stress_then_death(two: SpawnedWorkers) -> None:
    """A killed peer is named within a fraction of a second, and leaves nothing behind."""
    pids = [r["pid"] for r in two.call(join, 2, rendezvous())]
    assert len(set(two.call(stress, 500))) == 1
    two.call(count_reduces, 5000)
    for connection in two.connections:
        connection.send((wait_for_nobody,))
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    assert two.connections[0].poll(10)
    assert time.monotonic() - killed < 0.5
    ok, (_, message) = two.connections[0].recv()
    assert ok and f"the process of rank 1 (pid {pids[1]}) has ended" in message
    assert "group tp" in message and "rank 0" in message
    assert segments_of(pids) == []


def test_a_failed_peer_is_told(two: SpawnedWorkers) -> None:
    two.call(join, 2, rendezvous())
    (took, message), (_, own) = two.call(abort_or_wait)
    assert took < 1 and "rank 1 failed in the middle of a step" in message
    assert "rank 1 of group tp failed before" in own
    two.call(leave)
    # The same processes can form new groups.
    two.call(join, 2, rendezvous())
    two.call(set_timeout, 0.5)
    (took, message), (_, late) = two.call(come_late)
    assert 0.4 < took < 2 and "rank 1 did not come within 0.5 s" in message
    assert "rank 0 failed" in late
    two.call(leave)
    two.call(join, 2, rendezvous())
    messages = two.call(bring_other_size)
    assert any("bytes and this rank" in m and "the ranks run different programs" in m for m in messages)
    two.call(leave)


def wait_on_one_core(rank: int, worker: Any) -> list[float]:
    """Three ranks wait a second for the last one, all on one core; returns how long each yield of this rank took."""
    import torch

    from minivllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    sched_yield, cores = os.sched_yield, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yields: list[float] = []

    def counted() -> None:
        begun = time.monotonic()
        sched_yield()
        yields.append(time.monotonic() - begun)

    parallel_state.get_world_group().barrier()
    if rank == 3:
        time.sleep(1)
    os.sched_yield = counted
    try:
        group.all_reduce(torch.ones(4))
    finally:
        os.sched_yield = sched_yield
        os.sched_setaffinity(0, cores)
    return yields


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no way to keep processes on one core")
def test_ranks_that_wait_give_the_core_away_a_few_times_only(four: SpawnedWorkers) -> None:
    """As in test_shm_broadcast_processes: to each other here, each charged for it as for a slice of work."""
    from minivllm.distributed.wakeup import CROWDED_S

    four.call(join, 4, rendezvous())
    waits = four.call(wait_on_one_core)[:3]
    taken_up = [sum(seconds > CROWDED_S for seconds in yields) for yields in waits]
    # Ten in a wait for each of the three others; without the limit 280. Whoever comes when they sleep already meets nobody.
    assert 1 <= max(taken_up) <= 30, [yields[-20:] for yields in waits]
    four.call(leave)


def test_layers_of_pipeline_stages() -> None:
    assert [get_pp_indices(4, r, 2) for r in range(2)] == [(0, 2), (2, 4)]
    assert [get_pp_indices(4, r, 3) for r in range(3)] == [(0, 1), (1, 3), (3, 4)]
    assert [get_pp_indices(7, r, 4) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [get_pp_indices(5, r, 1) for r in range(1)] == [(0, 5)]
