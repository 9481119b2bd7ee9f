"""Profile-first: a worker process per case, with a device that counts.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from minivllm.learn import kit

MIB = 1 << 20


class Device:
    """Memory of fixed size that counts who takes how much."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, size_bytes: int, what: str) -> None:
        if size_bytes < 0:
            raise ValueError(f"{what}: {size_bytes} bytes cannot be allocated")
        if self.used_bytes + size_bytes > self.total_bytes:
            raise MemoryError(
                f"{what} needs {size_bytes // MIB} MiB, and {(self.total_bytes - self.used_bytes) // MIB} of "
                f"{self.total_bytes // MIB} MiB are free"
            )
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @contextmanager
    def borrow(self, size_bytes: int, what: str) -> Iterator[None]:
        self.allocate(size_bytes, what)
        yield
        self.used_bytes -= size_bytes


@dataclass
class Model:
    weights_bytes: int
    activations_bytes: int
    block_bytes: int

    def load_weights(self, device: Device) -> None:
        device.allocate(self.weights_bytes, "weights")

    def profile_run(self, device: Device) -> None:
        with device.borrow(self.activations_bytes, "activations of the largest batch"):
            pass


@dataclass(frozen=True)
class Case:
    """Sizes in MiB, and what must come out: blocks, or 0 for the ValueError."""

    total: int
    utilization: float
    weights: int
    activations: int
    block: int
    blocks: int


ORDINARY = Case(total=1000, utilization=0.9, weights=300, activations=200, block=7, blocks=57)
NO_ROOM = Case(total=1000, utilization=0.9, weights=700, activations=198, block=7, blocks=0)


def check_largest_batch_runs(module: Any) -> None:
    """With the cache in place, the largest batch still runs."""
    said = _run(module, ORDINARY)
    if "out_of_memory" in said:
        raise kit.Broken(said["out_of_memory"])


def check_within_its_share(module: Any) -> None:
    """The process never takes more than its share of the device, not even in the middle of the largest batch."""
    said = _run(module, ORDINARY)
    limit = ORDINARY.total * ORDINARY.utilization
    if said["peak"] > limit * MIB:
        raise kit.Broken(f"the share is {limit:.0f} MiB, and the peak is {said['peak'] / MIB:.0f} MiB")


def check_nothing_wasted(module: Any) -> None:
    """The cache has as many whole blocks as fit beside the peak of the largest batch, and the number is returned."""
    said = _run(module, ORDINARY)
    if said.get("blocks") != ORDINARY.blocks:
        raise kit.Broken(f"prepare returned {said.get('blocks')} blocks, and {ORDINARY.blocks} fit")
    if said["cache"] != ORDINARY.blocks * ORDINARY.block * MIB:
        raise kit.Broken(
            f"the cache was allocated with {said['cache'] / MIB:.0f} MiB for {ORDINARY.blocks} blocks"
        )


def check_no_room(module: Any) -> None:
    """A device without room for a single block is refused with a ValueError that says so."""
    said = _run(module, NO_ROOM)
    if "refused" not in said:
        raise kit.Broken(
            f"no block fits, and prepare {said.get('out_of_memory') or 'returned ' + str(said['blocks'])}"
        )


@functools.cache
def _run(module: Any, case: Case) -> dict[str, Any]:
    ours, theirs = kit.context.Pipe(duplex=False)
    worker = kit.start(_worker, module.prepare, case, theirs)
    theirs.close()
    try:
        if not ours.poll(5 * kit.slack()):
            kit.must_end(worker, 0.1, "prepare")
        said: dict[str, Any] = ours.recv()
    except EOFError:
        raise kit.Broken("the worker ended without a result") from None
    finally:
        kit.end(worker)
    if "raised" in said:
        raise kit.Broken(said["raised"])
    return said


def _worker(prepare: Any, case: Case, result: Connection) -> None:
    device = Device(case.total * MIB)
    model = Model(case.weights * MIB, case.activations * MIB, case.block * MIB)
    said: dict[str, Any] = {}
    try:
        said["blocks"] = prepare(model, device, case.utilization)
        said["cache"] = device.used_bytes - model.weights_bytes
        model.profile_run(device)
    except MemoryError as error:
        said["out_of_memory"] = f"ran out of memory: {error}"
    except ValueError as error:
        said["refused" if case.blocks == 0 else "raised"] = f"ValueError: {error}"
    except Exception as error:
        said["raised"] = f"{type(error).__name__}: {error}"
    said["peak"] = device.peak_bytes
    result.send(said)
