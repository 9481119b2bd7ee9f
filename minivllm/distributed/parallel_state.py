"""Process groups: which ranks compute a tensor together, and how they exchange it.

vLLM 0.25.1: vllm/distributed/parallel_state.py (GroupCoordinator, init_distributed_environment,
initialize_model_parallel)
Articles: part 1 §5, part 2 §2.4.14

Ranks are numbered so that those of one tensor-parallel group are neighbours:

    world_size 4, tp 2, pp 2:   tp groups [0, 1] [2, 3]    pp groups [0, 2] [1, 3]
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from minivllm import envs, tracing
from minivllm.distributed.cpu_channels import CpuChannels
from minivllm.distributed.cpu_communicator import CpuCommunicator
from minivllm.platforms import get_platform
from minivllm.utils.system_utils import timer_slack

_DEFAULT_TIMEOUT: Final = datetime.timedelta(minutes=30)
# Each gloo group has a thread that looks every 10 ms whether it is to end: four threads on each rank, which were most of
# what an idle engine used of a processor. The price is that destroying a group takes as much longer.
_GLOO_TIMER_SLACK_S: Final = 0.02


class Transfer(Protocol):
    """A broadcast under way."""

    def is_completed(self) -> bool:
        """Whether wait would return at once."""

    def wait(self) -> Any:
        """Return when the tensor may be used: on a CPU when it is there, on a GPU once later kernels will wait for it."""


class _ShmBroadcast:
    """A receiver's half of a broadcast through shared memory. Has to be waited for in the order of the broadcasts."""

    __slots__ = ("channels", "tensor")

    def __init__(self, channels: CpuChannels, tensor: Tensor) -> None:
        self.channels, self.tensor = channels, tensor

    def is_completed(self) -> bool:
        return self.channels.is_readable(self.channels.tokens)

    def wait(self) -> None:
        self.channels.read(self.channels.tokens, [self.tensor])


class GroupCoordinator:
    """The group that this rank belongs to, among those that divide the world along one dimension.

    Args:
        group_ranks: all groups of this dimension, `[num_groups][group_size]` global ranks.
        device: where the tensors are that the group exchanges.
        backend: backend for those tensors, "gloo" or "nccl".
        group_name: "world", "tp" or "pp".

    Attributes:
        ranks: global ranks of this rank's group.
        rank_in_group: position of this rank in `ranks`.
        device_group: torch group for tensors on the device.
        cpu_group: torch group for CPU tensors and objects; on a CPU it is device_group.
    """

    def __init__(
        self, group_ranks: list[list[int]], device: torch.device, backend: str, group_name: str
    ) -> None:
        self.unique_name = group_name
        self.rank = dist.get_rank()
        self.device = device
        self.backend = backend
        self.ranks: list[int] = next(ranks for ranks in group_ranks if self.rank in ranks)
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        with tracing.span("dist.new_group", group=group_name, ranks=str(self.ranks), backend=backend):
            # Every rank takes part in the creation of every group, also of those it does not belong to: torch
            # numbers groups by counting, and ranks that count differently wait for each other for ever.
            for ranks in group_ranks:
                device_group = _new_group(ranks, backend)
                cpu_group = device_group if backend == "gloo" else _new_group(ranks, "gloo")
                if ranks is self.ranks:
                    self.device_group, self.cpu_group = device_group, cpu_group
        self.group_ranks = group_ranks
        self.cpu_communicator: CpuCommunicator | None = None
        self.cpu_channels: CpuChannels | None = None
        self.broadcast_group: dist.ProcessGroup | None = None
        # Sends of torch that may not have been received yet, with their tensors, which must live until then.
        self._sends: list[tuple[dist.Work | None, Tensor]] = []
        self._all_reduce: Callable[[Tensor], Tensor] = self._torch_all_reduce
        self._all_gather: Callable[[Tensor, int], Tensor] = self._torch_all_gather

    def init_collectives(self, shared_memory_timeout_s: float) -> None:
        """As init_communicator, for a group that computes together: on a CPU its collectives go through shared memory.

        Args:
            shared_memory_timeout_s: how long a rank waits for another one in each of them.
        """

        def transport() -> str:
            if self.device.type != "cpu" or self.world_size == 1:
                return self.backend
            communicator = CpuCommunicator(
                self.cpu_group, self.ranks, self.rank_in_group, self.unique_name, shared_memory_timeout_s
            )
            self.cpu_communicator = communicator
            self._all_reduce, self._all_gather = communicator.all_reduce, communicator.all_gather
            return communicator.transport

        self.init_communicator(transport)

    def init_pipeline(self, shared_memory_timeout_s: float, max_token_bytes: int) -> None:
        """As init_communicator, for the stages of a pipeline: on a CPU they talk through shared memory.

        Args:
            shared_memory_timeout_s: how long a rank waits for another one.
            max_token_bytes: see CpuChannels.
        """

        def transport() -> str:
            if self.world_size == 1:
                return self.backend
            if self.device.type == "cpu":
                channels = CpuChannels(
                    self.cpu_group,
                    self.ranks,
                    self.rank_in_group,
                    self.unique_name,
                    shared_memory_timeout_s,
                    max_token_bytes,
                )
                if channels.usable:
                    self.cpu_channels = channels
                    return channels.transport
            # Of their own, or the broadcast of tokens would stand in line with the hidden states of later batches.
            for ranks in self.group_ranks:
                group = _new_group(ranks, self.backend)
                if ranks is self.ranks:
                    self.broadcast_group = group
            return self.backend

        self.init_communicator(transport)

    def init_communicator(self, transport: Callable[[], str] | None = None) -> None:
        """Make the first collective, in which NCCL really builds its communicator, and wait for it.

        Args:
            transport: sets up a faster way afterwards; returns what it is.
        """
        with tracing.span("dist.init_communicator", group=self.unique_name, world_size=self.world_size) as s:
            ones = torch.ones(1, device=self.device)
            dist.all_reduce(ones, group=self.device_group)
            get_platform(self.device.type).synchronize()
            assert ones.item() == self.world_size
            s.set(transport=self.backend if transport is None else transport())
            if self.backend == "nccl":
                version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
                s.set(nccl_version=".".join(map(str, version)))

    @property
    def first_rank(self) -> int:
        """Global rank of the first member."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """Global rank of the last member."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Sum over the group, in place; the result has the same bits on every rank."""
        if self.world_size == 1:
            return input_
        if tracing.messages:
            attrs = {"group": self.unique_name, "bytes": input_.nbytes}
            with tracing.span("dist.all_reduce", attrs=attrs):
                return self._all_reduce(input_)
        return self._all_reduce(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Join the ranks' tensors along `dim`, in the order of ranks."""
        if self.world_size == 1:
            return input_
        if tracing.messages:
            attrs = {"group": self.unique_name, "bytes": input_.nbytes}
            with tracing.span("dist.all_gather", attrs=attrs):
                return self._all_gather(input_, dim)
        return self._all_gather(input_, dim)

    def send_tensor_dict(self, tensor_dict: dict[str, Tensor]) -> None:
        """Send contiguous tensors to the next rank of the group, without waiting until they are received."""
        tensors = list(tensor_dict.values())
        if tracing.messages:
            dst, size = self.ranks[self.rank_in_group + 1], sum(t.nbytes for t in tensors)
            with tracing.span("dist.send", group=self.unique_name, dst=dst, bytes=size, what="hidden states"):
                self._send(tensors)
        else:
            self._send(tensors)

    def recv_tensor_dict(self, tensor_dict: dict[str, Tensor]) -> None:
        """Fill contiguous tensors with what the previous rank of the group sends; it has to send the same shapes.

        Deviation from vLLM: no metadata travels. Both stages lay out the same batch, so the receiver knows the shapes.
        """
        tensors = list(tensor_dict.values())
        if tracing.messages:
            src, size = self.ranks[self.rank_in_group - 1], sum(t.nbytes for t in tensors)
            with tracing.span("dist.recv", group=self.unique_name, src=src, bytes=size, what="hidden states"):
                self._recv(tensors)
        else:
            self._recv(tensors)

    def _send(self, tensors: list[Tensor]) -> None:
        if self.cpu_channels is not None:
            assert self.cpu_channels.to_next is not None
            self.cpu_channels.write(self.cpu_channels.to_next, tensors)
            return
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        dst = self.ranks[self.rank_in_group + 1]
        self._sends = [(dist.isend(tensor, dst, group=self.device_group), tensor) for tensor in tensors]

    def _recv(self, tensors: list[Tensor]) -> None:
        if self.cpu_channels is not None:
            assert self.cpu_channels.from_previous is not None
            self.cpu_channels.read(self.cpu_channels.from_previous, tensors)
            return
        src = self.ranks[self.rank_in_group - 1]
        for tensor in tensors:
            dist.recv(tensor, src, group=self.device_group)

    def broadcast_from_last(self, tensor: Tensor) -> Transfer | None:
        """Hand a contiguous tensor from the last rank to all others, which go on with something else meanwhile.

        Returns:
            What to wait for before `tensor` is used, or on the last rank changed; None: nothing. Transfers have to be
            waited for in their order.
        """
        if self.cpu_channels is None:
            work: Transfer = dist.broadcast(tensor, self.last_rank, group=self.broadcast_group, async_op=True)
            return work
        if self.is_last_rank:
            self.cpu_channels.write(self.cpu_channels.tokens, [tensor])
            return None
        return _ShmBroadcast(self.cpu_channels, tensor)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Hand a picklable object from rank `src` of the group to all of it."""
        if self.world_size == 1:
            return obj
        box = [obj if self.rank_in_group == src else None]
        dist.broadcast_object_list(box, src=self.ranks[src], group=self.cpu_group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        # Always on the CPU group: an NCCL barrier would occupy the device and initialise one when there is none yet.
        dist.barrier(group=self.cpu_group)

    def abort(self) -> None:
        """Let peers that wait for this rank in a collective fail at once; no collective is possible afterwards."""
        for shared in (self.cpu_communicator, self.cpu_channels):
            if shared is not None:
                shared.abort()

    def destroy(self) -> None:
        """Release the shared memory and the torch groups."""
        for shared in (self.cpu_communicator, self.cpu_channels):
            if shared is not None:
                shared.close()
        self.cpu_communicator = self.cpu_channels = None
        self._sends.clear()
        if self.broadcast_group is not None:
            dist.destroy_process_group(self.broadcast_group)
        dist.destroy_process_group(self.device_group)
        if self.cpu_group is not self.device_group:
            dist.destroy_process_group(self.cpu_group)
        # A group's threads and sockets live as long as its object, and this one refers to itself by its methods: without
        # this they would be there until the next garbage collection.
        del self.device_group, self.cpu_group, self.broadcast_group, self._all_reduce, self._all_gather

    def _torch_all_reduce(self, input_: Tensor) -> Tensor:
        dist.all_reduce(input_, group=self.device_group)
        return input_

    def _torch_all_gather(self, input_: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(input_) for _ in self.ranks]
        dist.all_gather(parts, input_, group=self.device_group)
        return torch.cat(parts, dim)


_WORLD: GroupCoordinator | None = None
_TP: GroupCoordinator | None = None
_PP: GroupCoordinator | None = None
# For creating groups and for their operations; None: torch's own, too short only where a reader may keep ranks standing.
_groups_timeout: datetime.timedelta | None = None


def _need(group: GroupCoordinator | None, name: str) -> GroupCoordinator:
    if group is None:
        raise RuntimeError(f"the {name} group does not exist on this process; Worker.init_device creates it")
    return group


def get_world_group() -> GroupCoordinator:
    """All ranks. Raises RuntimeError before init_distributed_environment."""
    return _need(_WORLD, "world")


def get_tp_group() -> GroupCoordinator:
    """The ranks that hold the shards of this rank's layers. Raises RuntimeError before initialize_model_parallel."""
    return _need(_TP, "tensor parallel")


def get_pp_group() -> GroupCoordinator:
    """The ranks of the pipeline's stages. Raises RuntimeError before initialize_model_parallel."""
    return _need(_PP, "pipeline parallel")


def abort_model_parallel() -> None:
    """Let all ranks that wait for this one, in its stage or in others, fail at once. Before the groups exist: nothing."""
    for group in (_TP, _PP):
        if group is not None:
            group.abort()


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def model_parallel_is_initialized() -> bool:
    return _TP is not None and _PP is not None


def init_distributed_environment(
    world_size: int,
    rank: int,
    distributed_init_method: str,
    device: torch.device,
    backend: str,
    single_host: bool = True,
    timeout: datetime.timedelta = _DEFAULT_TIMEOUT,
) -> None:
    """Meet the other ranks and build the world group.

    Args:
        distributed_init_method: `tcp://host:port` or `file:///path` that all ranks are given.
        backend: "gloo" or "nccl".
        single_host: all ranks run here, so that no network is needed.
        timeout: how long to wait for the other ranks.

    Raises:
        RuntimeError: not all ranks came in time, or this process already belongs to a world.
    """
    global _WORLD, _groups_timeout
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a distributed environment")
    if single_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Deviation from vLLM: ranks of one host talk over the loopback interface. gloo would resolve the host's
        # name, which fails or waits on a laptop without a network.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    with tracing.span(
        "dist.rendezvous", method=distributed_init_method.partition(":")[0], rank=rank, world_size=world_size
    ) as s:
        store, rank, world_size = next(rendezvous(distributed_init_method, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        # With a TCPStore rank 0, the server, waits for all, the others for rank 0 only; with a FileStore nobody waits.
        # This makes each rank wait for all, and says so in the span.
        store.set(f"arrived/{rank}", str(os.getpid()))
        pids = [int(store.get(f"arrived/{peer}")) for peer in range(world_size)]
        s.set(pids=str(pids), store=type(store).__name__)
    with tracing.span("dist.init_process_group", backend=backend, world_size=world_size, rank=rank):
        with timer_slack(_GLOO_TIMER_SLACK_S):
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _groups_timeout = timeout if timeout > _DEFAULT_TIMEOUT else None
    _WORLD = GroupCoordinator([list(range(world_size))], device, backend, "world")
    _WORLD.init_communicator()


def _new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    with timer_slack(_GLOO_TIMER_SLACK_S):
        group: dist.ProcessGroup = dist.new_group(ranks, _groups_timeout, backend)
    return group


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, max_token_bytes: int = 0
) -> None:
    """Divide the world into tensor-parallel and pipeline-parallel groups.

    Args:
        max_token_bytes: size of the longest message in which the last stage hands tokens back.

    Raises:
        RuntimeError: the sizes do not multiply to the world size, or the groups exist already.
    """
    global _TP, _PP
    world = get_world_group()
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    if world.world_size != tp * pp:
        raise RuntimeError(f"world size {world.world_size} is not tp {tp} x pp {pp}")
    if model_parallel_is_initialized():
        raise RuntimeError("the model parallel groups exist already")
    tp_ranks = [list(range(first, first + tp)) for first in range(0, tp * pp, tp)]
    _TP = GroupCoordinator(tp_ranks, world.device, world.backend, "tp")
    _TP.init_collectives(envs.MINIVLLM_COLLECTIVE_TIMEOUT_S)
    pp_ranks = [list(range(first, tp * pp, tp)) for first in range(tp)]
    _PP = GroupCoordinator(pp_ranks, world.device, world.backend, "pp")
    _PP.init_pipeline(envs.MINIVLLM_COLLECTIVE_TIMEOUT_S, max_token_bytes)


def destroy_model_parallel() -> None:
    """Destroy the groups of initialize_model_parallel; nothing happens when there are none."""
    global _TP, _PP
    for group in (_PP, _TP):
        if group is not None:
            group.destroy()
    _TP = _PP = None


def destroy_distributed_environment() -> None:
    """Leave the world; nothing happens outside of one."""
    global _WORLD
    if _WORLD is not None:
        _WORLD.destroy()
        _WORLD = None
    if dist.is_initialized():
        dist.destroy_process_group()


class PipelineStage(NamedTuple):
    """Which part of a model is built: all of it when there is one stage, as of a draft model on the last rank."""

    rank: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.num_stages - 1


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """First layer of a stage and the one after its last.

    Layers that do not divide evenly go to the last stages but one, since the last one also computes the logits and
    the first one the embedding.
    """
    partitions = [num_hidden_layers // pp_size] * pp_size
    for i in range(2, num_hidden_layers % pp_size + 2):
        partitions[-i] += 1
    start = sum(partitions[:pp_rank])
    return start, start + partitions[pp_rank]
