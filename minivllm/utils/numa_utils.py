"""Keeping a worker's threads and memory on one NUMA node, where the machine has several.

vLLM 0.25.1: vllm/utils/numa_utils.py (configure_subprocess)
Articles: part 2 §2.4.3
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def parse_cpulist(text: str) -> set[int]:
    """CPUs of a kernel list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """NUMA node -> its CPUs that this process may use; nodes without such CPUs are left out."""
    if not root.is_dir():
        return {}
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for path in sorted(root.glob("node[0-9]*")):
        cpus = parse_cpulist((path / "cpulist").read_text(encoding="ascii")) & allowed
        if cpus:
            nodes[int(path.name[4:])] = cpus
    return nodes


def choose_numa_node(local_rank: int, local_world_size: int, nodes: dict[int, set[int]]) -> int | None:
    """Node of a local rank: ranks are spread evenly, neighbours together. None: nothing to choose from."""
    if len(nodes) < 2:
        return None
    return sorted(nodes)[local_rank * len(nodes) // local_world_size]


def bind_to_numa_node(node: int) -> None:
    """Run this process, and the threads it will start, on the CPUs of `node`, and prefer memory there.

    Call it before any thread exists and before torch is imported: threads inherit, running ones do not change.
    """
    os.sched_setaffinity(0, numa_nodes()[node])
    try:
        libnuma = ctypes.CDLL("libnuma.so.1")
    except OSError:
        # Linux gives a page to the node that touches it first, so the affinity alone already does most of it.
        return
    libnuma.numa_set_preferred(ctypes.c_int(node))
