"""On a CUDA GPU: graphs against eager against transformers, NCCL, memory, speed; the traces are kept.

Run by tests/gpu/run.sh. On a machine without a GPU every test is skipped with the reason; two GPUs add TP=2 and PP=2.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.exceptions import ConfigError, WorkerStartupError
from minivllm.platforms.cuda import why_no_cuda
from minivllm.trace_store import TraceStore

torch = pytest.importorskip("torch")
_NO_CUDA = why_no_cuda() or ("" if torch.cuda.is_available() else "torch finds no usable GPU")
pytestmark = [pytest.mark.skipif(bool(_NO_CUDA), reason=_NO_CUDA), pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
GPUS = 0 if _NO_CUDA else torch.cuda.device_count()
MAX_TOKENS = 48
PROMPTS = [
    "def f(",
    "class A",
    "the function returns",
    "import",
    "An object is said to be immutable when its value cannot change once it has been created, which "
    "means that an operation on it has to return another object",
]


def trace_directory(name: str) -> Path:
    """A fresh one under minivllm/assets/traces/<gpu>/."""
    import shutil

    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    root = Path(os.environ.get("MINIVLLM_GPU_TRACES") or ROOT / "minivllm/assets/traces")
    directory = root / gpu / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    return directory


def start(**kwargs: Any) -> LLM:
    defaults = {"device": "cuda", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
    return LLM(**{**defaults, "distributed_executor_backend": "mp", "gpu_memory_utilization": 0.5, **kwargs})


def tokens(llm: LLM, params: SamplingParams | None = None) -> list[list[int]]:
    params = params or SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """Greedy tokens by transformers on the same GPU, up to the first choice that rounding could turn."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_CHECKPOINT, dtype=torch.float32).cuda().eval()
    result = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt).ids
            out: list[int] = []
            while len(out) < MAX_TOKENS:
                best = model(torch.tensor([ids + out], device="cuda")).logits[0, -1].topk(2)
                if float(best.values[0] - best.values[1]) < 1e-3:
                    break
                out.append(int(best.indices[0]))
            result.append(out)
    assert sum(map(len, result)) > MAX_TOKENS
    return result


def check(got: list[list[int]], reference: list[list[int]]) -> None:
    for number, (mine, theirs) in enumerate(zip(got, reference, strict=True)):
        assert mine[: len(theirs)] == theirs, f"prompt {number}"


def modes_used(directory: Path) -> set[str]:
    spans = TraceStore.open(directory).spans(name="model.forward")
    return {s.attributes["minivllm.graph"].split()[0] for s in spans if s.attributes["minivllm.step"]}


def test_eager_equals_transformers(reference: list[list[int]]) -> None:
    directory = trace_directory("eager")
    with start(enforce_eager=True, trace=directory) as llm:
        check(tokens(llm), reference)
    assert modes_used(directory) == {"none:"}


def test_graphs_equal_transformers(reference: list[list[int]]) -> None:
    """Decode steps by FULL graphs, prompts by PIECEWISE ones; both are in the trace, with sizes and memory."""
    directory = trace_directory("graphs")
    with start(trace=directory) as llm:
        check(tokens(llm), reference)
        # One request alone, and so many that they do not fit at once: other sizes, padded.
        alone = llm.generate(
            PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        check([list(alone[0].outputs[0].token_ids)], [reference[0][:8]])
    assert {"FULL", "PIECEWISE"} <= modes_used(directory)
    (capture,) = TraceStore.open(directory).spans(name="runner.capture_model")
    assert capture.attributes["minivllm.skipped"] is False
    assert capture.attributes["minivllm.bytes_full"] >= 0 and capture.attributes["minivllm.graphs"] > 10
    sizes = [int(n) for n in re.findall(r"\d+", capture.attributes["minivllm.sizes"])]
    assert sizes[0] == max(sizes), "the largest is captured first"


def test_seeded_sampling_is_the_same_with_graphs() -> None:
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=24, ignore_eos=True)
    with start(enforce_eager=True) as llm:
        eager = tokens(llm, params)
    with start() as llm:
        graphs = tokens(llm, params)
    # Rounding may turn a choice now and then, and everything after it.
    assert sum(a == b for a, b in zip(eager, graphs, strict=True)) >= len(PROMPTS) - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    with start(dtype=dtype) as llm:
        assert all(len(t) == MAX_TOKENS for t in tokens(llm))


def test_async_scheduling_equals_transformers(reference: list[list[int]]) -> None:
    with start(async_scheduling=True, trace=trace_directory("async")) as llm:
        check(tokens(llm), reference)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"model": str(BUNDLED_CHECKPOINT), "num_speculative_tokens": 3},
    ],
    ids=["ngram", "draft"],
)
def test_drafts_that_stay_on_the_gpu(config: dict[str, Any], reference: list[list[int]]) -> None:
    with start(async_scheduling=True, speculative_config=config) as llm:
        check(tokens(llm), reference)


def test_the_kv_cache_takes_what_profiling_leaves() -> None:
    directory = trace_directory("memory")
    with start(gpu_memory_utilization=0.3, max_num_seqs=64, trace=directory, trace_level="lifecycle"):
        pass
    (span,) = TraceStore.open(directory).spans(name="worker.determine_available_memory")
    _, total = torch.cuda.mem_get_info()
    assert 0 < span.attributes["minivllm.available_bytes"] < 0.3 * total
    assert span.attributes["minivllm.peak_bytes"] > 0


def test_nccl_builds_its_groups() -> None:
    """With one rank, too: each group makes a first collective, and says which NCCL."""
    directory = trace_directory("nccl")
    with start(trace=directory, trace_level="lifecycle"):
        pass
    spans = TraceStore.open(directory).spans(name="dist.init_communicator")
    assert {s.attributes["minivllm.group"] for s in spans} == {"world", "tp", "pp"}
    assert all(s.attributes["minivllm.nccl_version"] for s in spans)


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")
@pytest.mark.parametrize(
    "sizes",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["tp2", "pp2"],
)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_two_ranks_equal_transformers(sizes: dict[str, int], eager: bool, reference: list[list[int]]) -> None:
    name = "-".join(f"{k.partition('_')[0]}{v}" for k, v in sizes.items()) + (
        "-eager" if eager else "-graphs"
    )
    with start(enforce_eager=eager, trace=trace_directory(name), **sizes) as llm:
        check(tokens(llm), reference)


@pytest.mark.skipif(GPUS != 1, reason=f"needs exactly one GPU, there are {GPUS}")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises((ConfigError, WorkerStartupError), match="needs a GPU of its own"):
        start(tensor_parallel_size=2)


def test_speed(reference: list[list[int]]) -> None:
    """Decode, one request: graphs, eager, transformers. Graphs have to win; the figures are printed (pytest -s)."""
    from transformers import AutoModelForCausalLM

    many = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    speed: dict[str, float] = {}
    for name, eager in (("graphs", False), ("eager", True)):
        with start(enforce_eager=eager) as llm:
            llm.generate(PROMPTS[:1], many, use_tqdm=False)
            before = time.perf_counter()
            llm.generate(PROMPTS[:1], many, use_tqdm=False)
            speed[name] = 200 / (time.perf_counter() - before)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_CHECKPOINT, dtype=torch.float32).cuda().eval()
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        before = time.perf_counter()
        model.generate(ids, max_new_tokens=200, min_new_tokens=200, do_sample=False)
        torch.cuda.synchronize()
        speed["transformers"] = 200 / (time.perf_counter() - before)
    print({name: f"{value:.0f} tok/s" for name, value in speed.items()})
    assert speed["graphs"] > speed["eager"]
