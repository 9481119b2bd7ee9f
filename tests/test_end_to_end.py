"""Text in, tokens out: the whole path against transformers, over models, ranks, executors and ways to schedule.

The full product of what can vary would take an hour, so the rows of CASES pair each value with many others;
`pytest -m slow` runs the product. References are computed once per checkpoint, by transformers in this process.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm_processes

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.trace_store import TraceStore

MAX_TOKENS = 16
NUM_PROMPTS = 40
# A smaller distance between the two most likely tokens could be turned by another order of summation.
SAFE_GAP = 1e-3
WORDS = [
    "the",
    "function",
    "returns",
    "a",
    "class",
    "when",
    "its",
    "argument",
    "is",
    "not",
    "def",
    "import",
    "self",
]


@dataclass
class Reference:
    """Attributes:
    logprobs: per prompt and generated token, the log-probabilities of the whole vocabulary.
    """

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[Any]
    prompt_logprobs: list[Any]


def prompts_for(tokenizer: Any) -> list[list[int]]:
    """Of 1 to 120 tokens, so that some fit into one block, and some need several steps of a small budget."""
    prompts = []
    for i in range(NUM_PROMPTS + 10):
        text = " ".join(WORDS[(i * 5 + 3 * j) % len(WORDS)] for j in range(1 + i * 7 % 50))
        prompts.append(tokenizer.encode(text).ids[: 1 + i * 13 % 120])
    return prompts


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name in made:
            return made[name]
        path = Path(BUNDLED_CHECKPOINT)
        if name != "bundled":
            path = make_random_checkpoint(tmp_path_factory.mktemp(name) / name, **PRESETS[name])
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        result = Reference(path, [], [], [], [])
        with torch.inference_mode(), warnings.catch_warnings():
            # transformers 5 has a new name for past_key_values, which transformers 4 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            for prompt in prompts_for(Tokenizer.from_file(str(path / "tokenizer.json"))):
                out = model(torch.tensor([prompt]), use_cache=True)
                rows = [out.logits[0, -1].log_softmax(-1)]
                tokens = [int(rows[0].argmax())]
                while len(tokens) < MAX_TOKENS:
                    step = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values)
                    rows.append(step.logits[0, -1].log_softmax(-1))
                    tokens.append(int(rows[-1].argmax()))
                logprobs = torch.stack(rows)
                best = logprobs.topk(2).values
                if float((best[:, 0] - best[:, 1]).min()) < SAFE_GAP:
                    continue
                result.prompts.append(prompt)
                result.tokens.append(tokens)
                result.logprobs.append(logprobs)
                result.prompt_logprobs.append(out.logits[0, :-1].log_softmax(-1))
                if len(result.prompts) == NUM_PROMPTS:
                    break
        assert len(result.prompts) == NUM_PROMPTS
        made[name] = result
        return result

    return get


@dataclass(frozen=True)
class Case:
    """One engine. `budget` tokens a step force chunks, few `blocks` force preemption."""

    model: str = "bundled"
    tp: int = 1
    backend: str = "uni"
    process: bool = False
    budget: int = 2048
    blocks: int | None = None
    block_size: int = 16
    asynchronous: bool = False

    @property
    def id(self) -> str:
        parts = [self.model, f"tp{self.tp}", self.backend, "process" if self.process else "inproc"]
        parts += [f"budget{self.budget}"] if self.budget < 2048 else []
        parts += [f"blocks{self.blocks}x{self.block_size}"] if self.blocks else []
        parts += ["async"] if self.asynchronous else []
        return "-".join(parts)


CHUNKED, PREEMPTED = {"budget": 24}, {"blocks": 30, "block_size": 8}
CASES = [
    # In process and on one rank an engine costs nothing to start: here the models vary.
    Case(),
    Case("qwen3-gqa1", **CHUNKED),
    Case("qwen3-gqa2", **PREEMPTED),
    Case("qwen3-gqa4", budget=9, blocks=30, block_size=8),
    Case("qwen3-kv2", block_size=5),
    Case("qwen3-untied", budget=24, block_size=3),
    Case("qwen3-bias", asynchronous=True),
    Case("llama-gqa1", **PREEMPTED),
    Case("llama-gqa2", **CHUNKED),
    # Over processes: each tp, executor and way to schedule, with different models.
    Case(tp=2, backend="mp", process=True),
    Case("qwen3-gqa4", tp=2, backend="mp", process=True, budget=24, blocks=30, block_size=8),
    Case("llama-gqa2", tp=2, backend="mp", **PREEMPTED),
    Case("qwen3-kv2", tp=4, backend="mp", **CHUNKED),
    Case("llama-gqa1", tp=1, backend="mp", process=True, **CHUNKED),
    Case("qwen3-untied", tp=1, backend="uni", process=True, **PREEMPTED),
    Case("qwen3-1m", tp=2, backend="mp", process=True, asynchronous=True, **PREEMPTED),
]
PRODUCT = [
    Case(model, tp, backend, process, budget, blocks, 8, asynchronous)
    for model, tp, backend, process, budget, blocks, asynchronous in itertools.product(
        ("bundled", "qwen3-kv2", "llama-gqa2"),
        (1, 2, 4),
        ("uni", "mp"),
        (False, True),
        (2048, 24),
        (None, 30),
        (False, True),
    )
    if backend == "mp" or tp == 1
]


def run(
    case: Case, reference: Reference, monkeypatch: pytest.MonkeyPatch, params: Any
) -> list[RequestOutput]:
    if case.process:
        monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "1")
    else:
        warm_processes.use(monkeypatch)
    with LLM(
        reference.path,
        tensor_parallel_size=case.tp,
        distributed_executor_backend=case.backend,
        dtype="float32",
        device="cpu",
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=case.budget,
        num_gpu_blocks_override=case.blocks,
        block_size=case.block_size,
        async_scheduling=case.asynchronous or None,
    ) as llm:
        return llm.generate(reference.prompts, params, use_tqdm=False)


def check(case: Case, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with_logprobs = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    # Every fourth request asks for log-probabilities: they must not change what the others get.
    params = [with_logprobs if i % 4 == 0 else greedy for i in range(NUM_PROMPTS)]
    outputs = run(case, reference, monkeypatch, params)
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        assert output.prompt_token_ids == reference.prompts[i]
        assert completion.token_ids == reference.tokens[i], f"prompt {i}"
        assert completion.finish_reason == "length"
        assert (completion.logprobs is not None) == (i % 4 == 0)
        if i % 4 == 0:
            check_logprobs(output, reference, i)


def check_logprobs(output: RequestOutput, reference: Reference, index: int) -> None:
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for position, row in zip(completion.logprobs, reference.logprobs[index], strict=True):
        best = row.topk(3)
        assert next(iter(position)) == int(best.indices[0])
        for token_id, logprob in position.items():
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [lp.rank for lp in position.values()] == [1, 2, 3]
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, position, row in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], reference.prompt_logprobs[index], strict=True
    ):
        assert position is not None
        assert position[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        rank = position[token_id].rank
        assert rank is not None
        assert int((row > row[token_id] + 1e-4).sum()) < rank <= int((row >= row[token_id] - 1e-4).sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_greedy_tokens_equal_transformers(
    case: Case, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, reference(case.model), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: case.id)
def test_full_product(
    case: Case, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, reference(case.model), monkeypatch)


def test_seeded_sampling_does_not_depend_on_the_batch_or_the_ranks(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others, in chunks, preempted: a request with a seed of its own yields the same tokens."""
    ref = reference("bundled")
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    plain = run(Case(), ref, monkeypatch, params)
    harried = run(Case(budget=24, blocks=30, block_size=8), ref, monkeypatch, params)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in harried]
    assert [o.outputs[0].token_ids for o in plain] != ref.tokens


def test_a_traced_run_is_one_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP=2: one trace id, one root, no span whose parent is missing; the catalogue's rows of this path are there."""
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "1")
    with LLM(tensor_parallel_size=2, device="cpu", max_model_len=128, max_num_seqs=4, trace=tmp_path) as llm:
        llm.generate(["def f(", "class A"], SamplingParams(max_tokens=3), use_tqdm=False)
    store = TraceStore.open(tmp_path)
    assert store.trace_ids == [store.trace_id] and not store.damaged_lines
    spans = list(store.spans())
    names = {span.name for span in spans}
    assert {
        "run",
        "engine_core.spawn",
        "engine_core.init",
        "engine_core.ready",
        "engine_core.init_kv_caches",
        "engine_core.init_scheduler",
        "engine_core.step",
        "engine_core.shutdown",
        "scheduler.schedule",
        "scheduler.update_from_output",
        "request",
    } <= names
    assert [span.name for span in spans if not span.parent_span_id] == ["run"]
    assert not store.orphans()
    assert not [span.name for span in spans if span.unfinished]
    requests = store.spans(name="request")
    attributes = [request.attributes for request in requests]
    assert [a["gen_ai.usage.output_tokens"] for a in attributes] == [3, 3]
    assert all(a["gen_ai.usage.input_tokens"] and a["gen_ai.response.finish_reasons"] for a in attributes)
