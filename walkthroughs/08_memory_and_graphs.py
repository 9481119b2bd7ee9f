"""Walkthrough 8: which part of the weights a rank reads, how much memory a step needs, and how the rest becomes a KV cache.

python walkthroughs/08_memory_and_graphs.py [--device cpu|cuda] [--tp N] [--trace DIR]
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import common
from common import closing, console, measured, say, step, table

from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.core.kv_cache_utils import get_kv_cache_configs
from minivllm.exceptions import ConfigError
from minivllm.trace_store import TraceStore

MIB = 1 << 20
BYTES_PER_VALUE = 2  # the bundled checkpoint is stored in bfloat16
QUERY = "model.layers.0.self_attn.q_proj.weight"


def place_in_checkpoint(worker: Any, file: str) -> tuple[int, int]:
    """Runs on every rank: first and last row that it holds of the first layer's query projection."""
    import torch
    from safetensors import safe_open

    layer = worker.model_runner.model.model.layer_list[0].self_attn
    mine = layer.qkv_proj.weight[: layer.num_heads * layer.head_dim].cpu()
    with safe_open(file, framework="pt") as checkpoint:
        whole = checkpoint.get_tensor(QUERY).to(mine.dtype)
    for first in range(0, len(whole), len(mine)):
        if torch.equal(whole[first : first + len(mine)], mine):
            return first, first + len(mine) - 1
    raise AssertionError("these rows are nowhere in the checkpoint")


# --8<-- [start:peak]
def peak_of_profile_run(worker: Any, num_tokens: int) -> int | None:
    """Runs on every rank: bytes that a forward pass of so many tokens needs beyond what is held all the time."""
    import ctypes
    import gc
    import re
    from pathlib import Path

    runner = worker.model_runner
    gc.collect()
    if worker.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner.profile_run(num_tokens)
        return torch.cuda.max_memory_allocated() - before
    # torch counts no allocations on a CPU. Linux keeps the highest resident size of a process; what was freed before, and the C
    # library still holds, must not hide what is needed now.
    status = Path("/proc/self/status")
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None

    def bytes_of(field: str) -> int:
        return 1024 * int(re.findall(rf"{field}:\s+(\d+) kB", status.read_text())[0])

    before = bytes_of("VmRSS")
    runner.profile_run(num_tokens)
    return bytes_of("VmHWM") - before


# --8<-- [end:peak]


def show_shards(store: TraceStore) -> None:
    loads = sorted(store.spans("model.load_weights"), key=lambda span: span.rank or 0)
    parts = table("tensor", "as a whole", "rank 0 reads", "that is")
    for part in loads[0].get("shards").split("; "):
        name, read, shape = re.fullmatch(r"(.+): (\d+) B of \[(.+)\]", part).groups()
        whole = BYTES_PER_VALUE * math.prod(int(size) for size in shape.split(", "))
        parts.add_row(name, f"\\[{shape}]", f"{int(read):,} bytes", f"{100 * int(read) / whole:.0f} %")
    console.print(parts)
    for load in loads:
        say(
            f"Rank {load.rank or 0} took {load.get('bytes'):,} bytes out of {load.get('tensors')} tensors that have "
            f"{load.get('bytes_of_whole_tensors'):,} together."
        )


def show_start_up(store: TraceStore) -> None:
    rows = table("step of rank 0", "began", "took", "what came of it")
    begin = store.spans("engine_core.init_kv_caches")[0].start_ns
    for name, attributes in (
        ("worker.get_kv_cache_spec", ("layers", "bytes_per_block")),
        ("runner.profile_run", ("num_tokens", "num_reqs")),
        ("worker.determine_available_memory", ("available_bytes", "source")),
        ("runner.initialize_kv_cache", ("num_blocks", "shape")),
        ("runner.warm_up", ("steps",)),
        ("runner.capture_model", ("mode", "reason")),
    ):
        span = min(store.spans(name), key=lambda span: span.rank or 0)
        values = ", ".join(f"{name} {span.get(name)}" for name in attributes if span.get(name) is not None)
        began = (span.start_ns - begin) / 1e6
        rows.add_row(name, measured(f"{began:.1f} ms"), measured(f"{span.duration_ns / 1e6:.1f} ms"), values)
    console.print(rows)


def show_blocks(config: Any, specs: list[Any]) -> None:
    rows = table("memory of the ranks", "blocks", "what decided")
    for case, memory, decided in (
        ("the same on all", [8 * MIB] * len(specs), "memory / bytes per block"),
        ("rank 0 has a quarter", [2 * MIB] + [8 * MIB] * (len(specs) - 1), "the rank with the least"),
        ("plenty", [1 << 40] * len(specs), "max_num_seqs requests of max_model_len"),
        ("next to nothing", [40_000] * len(specs), ""),
    ):
        try:
            blocks = str(get_kv_cache_configs(copy.deepcopy(config), specs, memory)[0].num_blocks)
        except ConfigError as error:
            blocks, decided = "none", str(error).partition(";")[0]
        rows.add_row(case, blocks, decided)
    console.print(rows)


def main() -> None:
    args = common.options(__doc__ or "")
    from minivllm import LLM

    with LLM(
        tensor_parallel_size=args.tp,
        distributed_executor_backend="mp",
        device=args.device,
        trace=args.trace,
        trace_level="lifecycle",
    ) as llm:
        file = str(Path(BUNDLED_CHECKPOINT) / "model.safetensors")
        places = llm.collective_rpc(place_in_checkpoint, args=(file,))
        specs = llm.collective_rpc("get_kv_cache_spec")
        sizes = (64, 256, 1024, 2048)
        peaks = {size: llm.collective_rpc(peak_of_profile_run, args=(size,)) for size in sizes}
        config = llm.llm_engine.vllm_config
    store = TraceStore.open(args.trace)

    step("Each rank reads its part of each tensor")
    show_shards(store)
    for rank, (first, last) in enumerate(places):
        console.print(f"  rank {rank} holds rows {first} to {last} of {QUERY}")

    step("From an empty device to a first step, in this order")
    show_start_up(store)

    step("What profile_run finds out")
    table_of_peaks = table("tokens in the batch", *(f"rank {rank}" for rank in range(args.tp)))
    for size, values in peaks.items():
        shown = (measured("–" if value is None else f"{value / MIB:.1f} MiB") for value in values)
        table_of_peaks.add_row(str(size), *shown)
    console.print(table_of_peaks)
    say(
        "The peak grows with the tokens, so it is measured with max_num_batched_tokens, the most that the scheduler may send. What is "
        "left of the memory beside weights and peak is the cache's. The other way round there would be no room for the first long prompt."
    )

    step("From bytes to blocks")
    show_blocks(config, specs)
    say("A block number means the same place on every rank, so there is one number of blocks for all.")

    step("CUDA graphs")
    capture = store.spans("runner.capture_model")[0]
    if capture.get("skipped"):
        say(
            f"None were recorded: {capture.get('reason')}. Each step launches its operations one by one, from Python."
        )
    else:
        say(
            f"Mode {capture.get('mode')}: {capture.get('graphs')} graphs, {capture.get('bytes') / MIB:.0f} MiB, batches of "
            f"{capture.get('sizes')}. They take their memory from what gpu_memory_utilization has left over."
        )
    closing(
        args.trace,
        "minivllm timeline {trace} --view init        the same with times, all ranks",
        "minivllm timeline {trace} --json             every attribute of every step",
    )


if __name__ == "__main__":
    main()
