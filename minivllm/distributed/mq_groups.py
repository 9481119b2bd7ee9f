"""Message queues between the ranks of a process group: the group carries the handle, the queue carries the messages.

vLLM 0.25.1: vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue.create_from_process_group,
MessageQueue.create_from_process_group_single_reader), vllm/distributed/parallel_state.py (in_the_same_node_as)
Articles: part 2 §2.5.4
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from minivllm.distributed.shm_broadcast import Handle, MessageQueue

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def host_identity() -> tuple[str, ...]:
    """Equal for two processes if and only if they can share memory: same kernel, same /dev/shm.

    Deviation from vLLM: the single-reader variant there divides the rank by the number of visible devices, which takes a
    remote rank for a local one as soon as not all visible devices are used.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        shm = os.stat("/dev/shm")
        return (boot, f"{shm.st_dev}:{shm.st_ino}")
    except OSError:
        return (os.uname().nodename,)


def create_from_process_group(
    pg: ProcessGroup,
    max_chunk_bytes: int | None,
    max_chunks: int | None,
    writer_rank: int = 0,
    external_writer_handle: Handle | None = None,
    blocking: bool = True,
    connect_ip: str | None = None,
    name: str = "",
) -> MessageQueue:
    """See MessageQueue.create_from_process_group."""
    import torch.distributed as dist

    rank = dist.get_rank(pg)
    hosts: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(hosts, host_identity(), group=pg)
    handle: list[Handle | None] = [None]
    if rank == writer_rank:
        if external_writer_handle is not None:
            queue = MessageQueue.create_from_handle(external_writer_handle, rank)
        else:
            readers = [r for r in range(len(hosts)) if r != writer_rank]
            local = [r for r in readers if hosts[r] == hosts[writer_rank]]
            queue = MessageQueue(
                len(readers), len(local), local, max_chunk_bytes, max_chunks, connect_ip, name=name
            )
        handle = [queue.export_handle()]
    dist.broadcast_object_list(handle, src=dist.get_global_rank(pg, writer_rank), group=pg)
    if rank != writer_rank:
        assert handle[0] is not None
        queue = MessageQueue.create_from_handle(handle[0], rank)
    if blocking:
        queue.wait_until_ready()
    return queue


def create_from_process_group_single_reader(
    pg: ProcessGroup,
    max_chunk_bytes: int | None,
    max_chunks: int | None,
    reader_rank: int = 0,
    blocking: bool = False,
    connect_ip: str | None = None,
    name: str = "",
) -> tuple[MessageQueue, list[Handle]]:
    """See MessageQueue.create_from_process_group_single_reader."""
    import torch.distributed as dist

    rank = dist.get_rank(pg)
    hosts: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(hosts, host_identity(), group=pg)
    local = hosts[rank] == hosts[reader_rank]
    queue = MessageQueue(
        1, int(local), [0] if local else [], max_chunk_bytes, max_chunks, connect_ip, name=name
    )
    handles: list[Any] | None = [None] * len(hosts) if rank == reader_rank else None
    dist.gather_object(queue.export_handle(), handles, dst=dist.get_global_rank(pg, reader_rank), group=pg)
    if blocking:
        queue.wait_until_ready()
    return queue, handles or []
