"""Speculation changes how many steps an output takes, and nothing else: tokens, log-probabilities, distribution."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_model import CountingModel, expected_tokens, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint
from minivllm.config import (
    BUNDLED_CHECKPOINT,
    CacheConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from minivllm.core.request import Request, RequestStatus
from minivllm.core.sched.output import NewRequestData, SchedulerOutput
from minivllm.core.sched.scheduler import AsyncScheduler, Scheduler
from minivllm.exceptions import ConfigError
from minivllm.outputs import DraftTokenIds, ModelRunnerOutput
from minivllm.spec_decode.metrics import SpecDecodingStats
from minivllm.trace_store import TraceStore
from minivllm.worker.gpu.input_batch import (
    InputBuffers,
    make_input_batch,
    post_update,
    put_draft_tokens,
)
from minivllm.worker.gpu.sample.sampler import Sampler
from minivllm.worker.gpu.spec_decode.ngram import propose_ngram
from minivllm.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from minivllm.worker.gpu.states import RequestState

CPU = torch.device("cpu")
TARGET = str(BUNDLED_CHECKPOINT)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# A copy of the target is always right as long as its cache is; a random model is never.
SAME = {"model": TARGET, "num_speculative_tokens": 3}
PROMPTS = [
    "The following functions are defined: the function returns a class when its argument is not",
    "def f(x):\n    return x\n\ndef g(x):\n    return",
    "import",
    "a class is a class is a class is a",
    "for x in range(10): print(x) " * 4,
    "The value of the",
]
GREEDY = [SamplingParams(temperature=0, max_tokens=20 + 7 * i, ignore_eos=True, logprobs=2) for i in range(6)]
RANDOM = [
    SamplingParams(temperature=0.9, seed=i, max_tokens=40, ignore_eos=True, logprobs=1) for i in range(6)
]
PENALIZED = [
    SamplingParams(
        temperature=0.8 * (i % 2),
        seed=i,
        max_tokens=40,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.1,
        min_tokens=15,
        top_p=0.95,
        top_k=50,
        min_p=0.001,
        bad_words=["the", "a class"],
        logit_bias={65: 2.0},
    )
    for i in range(6)
]
# Ends inside of accepted tokens: end-of-text, stop tokens, stop strings, and none at all.
STOPPING = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(temperature=0, max_tokens=60, stop_token_ids=list(range(60, 200))),
    SamplingParams(temperature=0, max_tokens=60, stop=["e"], min_tokens=3),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=60, stop=[" "], include_stop_str_in_output=True),
]
LOADS = {"greedy": GREEDY, "random": RANDOM, "penalized": PENALIZED, "stopping": STOPPING}


@contextmanager
def engine(runner: str = "V2", **kwargs: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
        patch.setenv("MINIVLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
        with LLM(device="cpu", max_model_len=256, **kwargs) as llm:
            yield llm
            llm.llm_engine.engine_core.engine_core.scheduler.check_invariants()  # type: ignore[attr-defined]


def stats(llm: LLM) -> SpecDecodingStats:
    found = llm.llm_engine.engine_core.engine_core.scheduler.spec_decoding_stats  # type: ignore[attr-defined]
    assert isinstance(found, SpecDecodingStats)
    return found


def count_preemptions(llm: LLM) -> list[str]:
    """A list that grows by the id of each request that is preempted from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    original, preempted = scheduler._preempt_request, list[str]()

    def preempt(request: Any, output: Any) -> None:
        preempted.append(request.request_id)
        original(request, output)

    scheduler._preempt_request = preempt
    return preempted


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.outputs[0], other.outputs[0]
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for row, other_row in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert row.keys() == other_row.keys()
            assert all(abs(row[t].logprob - other_row[t].logprob) < 1e-4 for t in row)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[RequestOutput]]:
    with engine() as llm:
        return {name: llm.generate(PROMPTS, params) for name, params in LOADS.items()}


@pytest.fixture(scope="module")
def wrong_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model of another shape that knows nothing."""
    shape = PRESETS["qwen3-kv2"] | {"num_attention_heads": 2, "num_hidden_layers": 1}
    return str(make_random_checkpoint(tmp_path_factory.mktemp("draft") / "draft", **shape))


CASES = {
    "ngram": (NGRAM, {}),
    "ngram-chunked": (NGRAM, {"max_num_batched_tokens": 9, "max_num_seqs": 6}),
    "ngram-preempted": (NGRAM, {"num_gpu_blocks_override": 26, "block_size": 8}),
    "ngram-one": (NGRAM | {"num_speculative_tokens": 1}, {"max_num_seqs": 2}),
    "draft": (SAME, {}),
    "draft-preempted": (SAME, {"num_gpu_blocks_override": 26, "block_size": 8}),
    "ngram-async": (NGRAM, {"async_scheduling": True, "num_gpu_blocks_override": 26, "block_size": 8}),
    "draft-async": (SAME, {"async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 6}),
    "draft-v1-async": (
        SAME,
        {"runner": "V1", "async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 6},
    ),
    "wrong-draft": ({"num_speculative_tokens": 2}, {"num_gpu_blocks_override": 26, "block_size": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_without_speculation(
    case: str, plain: dict[str, list[RequestOutput]], wrong_model: str
) -> None:
    config, kwargs = CASES[case]
    with engine(
        speculative_config={"model": wrong_model} | config if case == "wrong-draft" else config, **kwargs
    ) as llm:
        preempted = count_preemptions(llm)
        for name, params in LOADS.items():
            before = stats(llm).num_draft_tokens, stats(llm).num_accepted_tokens
            assert_same(llm.generate(PROMPTS, params), plain[name])
            drafts = stats(llm).num_draft_tokens - before[0]
            accepted = stats(llm).num_accepted_tokens - before[1]
            assert drafts > 0
            # Penalties and the like are none of the draft model's business, and stop conditions cut drafts off.
            if case.startswith("draft") and name in ("greedy", "random"):
                assert accepted == drafts, "the draft model's cache is not what it should be"
        assert bool(preempted) == ("num_gpu_blocks_override" in kwargs)


def test_repetition_is_found_and_saves_steps(tmp_path: Path) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=48, ignore_eos=True, logit_bias=dict.fromkeys(range(300, 310), 40.0)
    )
    prompt = [[300, 301, 302, 303, 304, 305, 306, 307, 308, 309] * 3]
    with engine() as llm:
        expected = llm.generate(prompt, params)
    with engine(speculative_config=NGRAM, trace=tmp_path / "trace") as llm:
        assert_same(llm.generate(prompt, params), expected)
        verified, accepted = stats(llm).num_draft_tokens, stats(llm).num_accepted_tokens
    store = TraceStore.open(tmp_path / "trace")
    steps = store.spans("scheduler.update_from_output")
    assert len(steps) == 48 - accepted
    assert sum(s.attributes["minivllm.num_draft_tokens"] for s in steps) == verified
    assert sum(s.attributes["minivllm.num_accepted_tokens"] for s in steps) == accepted
    assert steps[-1].attributes["minivllm.acceptance_rate"] == round(accepted / verified, 4)
    proposals = store.spans("runner.propose_draft")
    assert {s.attributes["minivllm.method"] for s in proposals} == {"ngram"}
    assert sum(s.attributes["minivllm.accepted"] for s in proposals) == accepted
    assert sum(s.attributes["minivllm.verified"] for s in proposals) == verified
    assert sum(s.attributes["minivllm.proposed"] for s in proposals) >= verified


FULL: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 33, "max_num_seqs": 3}
TO_THE_END = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, prompt_logprobs=1)


@pytest.fixture(scope="module")
def plain_to_the_end() -> list[RequestOutput]:
    with engine(**FULL) as llm:
        return llm.generate(PROMPTS[:3], TO_THE_END)


@pytest.mark.parametrize(
    "config",
    [NGRAM | {"num_speculative_tokens": 9}, SAME | {"num_speculative_tokens": 9}],
    ids=["ngram", "draft"],
)
def test_up_to_the_models_length_and_with_no_block_to_spare(
    config: dict[str, Any], plain_to_the_end: list[RequestOutput]
) -> None:
    """Drafts that would reach beyond the last position, with block tables that are full; prompt log-probabilities."""
    expected = plain_to_the_end
    with engine(**FULL, speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS[:3], TO_THE_END)
        assert stats(llm).num_accepted_tokens > 0
    assert_same(outputs, expected)
    for output, other in zip(outputs, expected, strict=True):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256
        assert output.prompt_logprobs is not None and other.prompt_logprobs is not None
        for row, other_row in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert row is not None and other_row is not None and row.keys() == other_row.keys()
            assert all(abs(row[t].logprob - other_row[t].logprob) < 1e-4 for t in row)


def test_structured_output(plain: dict[str, list[RequestOutput]]) -> None:
    """Grammars and speculation at once: a mask for each position, drafts that the grammar allows."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["class", "function"]}, "line": {"type": "integer", "maximum": 999, "minimum": 0}},
        "required": ["kind", "line"],
        "additionalProperties": False,
    }  # fmt: skip
    kinds = [{"json": schema}, {"regex": "(ab)+c"}, {"choice": ["def", "class", "return"]}]
    params = [
        SamplingParams(seed=i, max_tokens=40, structured_outputs=StructuredOutputsParams(**kinds[i % 3]))
        if i % 4
        else SamplingParams(seed=i, max_tokens=20)
        for i in range(24)
    ]
    prompts = ['{"kind":"class","line":1}{"kind":"function","line":22} abab'] * 24
    with engine() as llm:
        expected = llm.generate(prompts, params)
    for config, asynchronous, runner in (
        (NGRAM, False, "V2"),
        (NGRAM, True, "V1"),
        (SAME, False, "V1"),
        (SAME, True, "V2"),
    ):
        with engine(runner, speculative_config=config, async_scheduling=asynchronous) as llm:
            assert_same(llm.generate(prompts, params), expected)
            assert stats(llm).num_accepted_tokens > 0
    assert all(json.loads(o.outputs[0].text) for i, o in enumerate(expected) if i % 4 and i % 3 == 0)


# --- the distribution


def test_the_tokens_have_the_targets_distribution() -> None:
    """Chi-square over two positions of a vocabulary of six, with drafts that are likely, unlikely, and impossible."""
    vocab, n = 6, 4000
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(vocab, generator=generator) * 1.5
    second = torch.randn(vocab, vocab, generator=generator) * 1.5
    first[4] = second[2, 1] = float("-inf")
    states = RequestState(n, 16, CPU, 2)
    sampler = Sampler(n, vocab, CPU, states, [], seed=0)
    buffers = InputBuffers(n, 3 * n, CPU)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=8) for i in range(n)]
    for i in range(n):
        slot = states.add_request(f"r{i}", 2, [0, 0, 0], 0)
        sampler.add_request(slot, NewRequestData(f"r{i}", [0, 0], [0, 0, 0], params[i], [], 0))
        states.num_computed_tokens.stage_write_elem(slot, 2)
        states.num_computed_tokens_np[slot] = 2
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    rng = random.Random(0)
    drafts = {
        f"r{i}": [rng.randrange(vocab), rng.randrange(vocab)][: rng.choice([0, 1, 2, 2])] for i in range(n)
    }
    drafts = {req_id: tokens for req_id, tokens in drafts.items() if tokens}
    scheduled = {f"r{i}": 1 + len(drafts.get(f"r{i}", ())) for i in range(n)}
    with torch.inference_mode():
        slots = torch.tensor([states.req_id_to_index[f"r{i}"] for i in range(n)])
        table = torch.tensor([[*drafts.get(f"r{i}", []), 5, 5][:2] for i in range(n)])
        put_draft_tokens(slots, states.num_computed_tokens.gpu[slots], states, table)
        batch = make_input_batch(scheduled, states, buffers, drafts)
        assert batch.logits_indices is not None and batch.num_draft_tokens_np is not None
        inputs = batch.input_ids[batch.logits_indices]
        positions = batch.positions[batch.logits_indices]
        logits = torch.where((positions == 2).view(-1, 1), first, second[inputs])
        output = RejectionSampler(sampler, CPU)(logits.clone(), batch)
        post_update(batch, states, output.sampled_token_ids, output.num_rejected)
    assert output.token_ids is not None and output.num_rejected is not None
    firsts, seconds = Counter[int](), {t: Counter[int]() for t in range(vocab)}
    for row, req_id in enumerate(batch.req_ids):
        tokens = [t for t in output.token_ids[row].tolist() if t >= 0]
        given = drafts.get(req_id, [])
        stand = 0
        while stand < len(given) and stand < len(tokens) and given[stand] == tokens[stand]:
            stand += 1
        assert len(tokens) == stand + 1 and int(output.num_rejected[row]) == len(given) - stand
        slot = states.req_id_to_index[req_id]
        assert states.all_token_ids.gpu[slot, 3 : 3 + len(tokens)].tolist() == tokens
        assert int(states.num_computed_tokens.gpu[slot]) == 2 + len(tokens)
        assert int(states.last_sampled_tokens[slot]) == tokens[-1]
        firsts[tokens[0]] += 1
        if len(tokens) > 1:
            seconds[tokens[0]][tokens[1]] += 1
    assert chi_square_ok(firsts, first)
    assert sum(sum(counter.values()) for counter in seconds.values()) > n / 20
    for token, counter in seconds.items():
        if counter:
            assert chi_square_ok(counter, second[token])


def chi_square_ok(observed: Counter[int], logits: torch.Tensor) -> bool:
    """Whether the counts fit softmax(logits), at a level of one in ten thousand (Wilson and Hilferty's approximation)."""
    total = sum(observed.values())
    expected = logits.double().softmax(-1) * total
    assert all(expected[t] > 0 for t in observed)
    chi = sum(float((observed[t] - e) ** 2 / e) for t, e in enumerate(expected.tolist()) if e > 0)
    degrees = int((expected > 0).sum()) - 1
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return z < 3.72


# --- n-grams


def reference_ngram(tokens: list[int], least: int, most: int, k: int) -> list[int]:
    """The longest repeated end, its first occurrence; what follows it."""
    for n in range(min(most, len(tokens) - 1), least - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def test_ngram_against_its_plain_definition() -> None:
    rng = random.Random(0)
    for _ in range(200):
        least = rng.randint(1, 3)
        most = rng.randint(least, 5)
        k = rng.randint(1, 6)
        rows = [[rng.randrange(rng.choice([2, 3, 9])) for _ in range(rng.randint(1, 30))] for _ in range(5)]
        longest = max(map(len, rows)) + rng.randint(0, 3)
        table = torch.tensor(
            [row + [rng.randrange(9) for _ in range(longest - len(row))] for row in rows], dtype=torch.int32
        )
        tokens, counts = propose_ngram(table, torch.tensor([len(row) for row in rows]), least, most, k)
        for row, proposed, count in zip(rows, tokens.tolist(), counts.tolist(), strict=True):
            assert proposed[:count] == reference_ngram(row, least, most, k)
            assert proposed[count:] == [0] * (k - count)


# --- the scheduler


class SpeculatingModel(CountingModel):
    """Verifies drafts, and proposes some that are right, some that are wrong, and fewer than it may.

    Attributes:
        lookahead: positions behind a step's tokens that a draft model writes to.
    """

    def __init__(self, *args: int, num_drafts: int, lookahead: int, rng: random.Random) -> None:
        super().__init__(*args)
        self.num_drafts, self.lookahead, self.rng = num_drafts, lookahead, rng
        # Of the last step, and each request's last ones.
        self.drafts: dict[str, list[int]] = {}
        self.known_drafts: dict[str, list[int]] = {}
        self.verified = 0

    def sample_tokens(self) -> ModelRunnerOutput:
        step, self._pending = self._pending, None
        assert step is not None
        output = ModelRunnerOutput()
        self.drafts = {}
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            slot = self.slots[req_id]
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            own = self.known_drafts.get(req_id, [])
            if drafts and drafts[0] < 0:
                assert set(drafts) == {-1}
                # Fewer were proposed than the scheduler takes them for.
                drafts = (own + [0] * len(drafts))[: len(drafts)]
            assert drafts == own[: len(drafts)] or drafts[len(own) :] == [0] * (len(drafts) - len(own))
            self.verified += len(drafts)
            tokens = slot.tokens + drafts
            end = slot.computed + num_tokens
            assert end <= len(tokens) and (not drafts or end == len(tokens))
            last = len(slot.prompt) + (slot.params.max_tokens or 0) - 1
            assert end <= last, "more is computed than can ever be wanted"
            assert len(slot.blocks) * self.block_size >= min(end + self.lookahead, last)
            for position in range(slot.computed, end):
                self.cache[slot.blocks[position // self.block_size], position % self.block_size] = tokens[
                    position
                ]
            output.req_ids.append(req_id)
            sampled: list[int] = []
            if end >= len(slot.tokens):
                stand = len(slot.tokens)
                seen = [
                    self.cache[slot.blocks[p // self.block_size], p % self.block_size] for p in range(end)
                ]
                assert seen[:stand] == slot.tokens
                while True:
                    sampled.append(next_token(seen[:stand], self.vocab_size))
                    if stand == end or seen[stand] != sampled[-1]:
                        break
                    stand += 1
                slot.tokens += sampled
                self.known_drafts[req_id] = self.drafts[req_id] = self._propose(slot.tokens)
            slot.computed = end - (len(drafts) - max(len(sampled) - 1, 0))
            output.sampled_token_ids.append(sampled)
        return output

    def _propose(self, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(self.rng.randint(0, self.num_drafts)):
            right = next_token(tokens + drafts, self.vocab_size)
            drafts.append(right if self.rng.random() < 0.7 else self.rng.randrange(self.vocab_size))
        return drafts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_drafts=st.integers(1, 5),
    method=st.sampled_from(["ngram", "draft_model"]),
    num_blocks=st.integers(13, 40),
    budget=st.integers(3, 24),
    asynchronous=st.booleans(),
    stages=st.integers(1, 3),
)
def test_any_drafts_leave_the_tokens_and_the_books_alone(
    seed: int,
    num_drafts: int,
    method: str,
    num_blocks: int,
    budget: int,
    asynchronous: bool,
    stages: int,
) -> None:
    """Arrivals, aborts, chunks, preemption; drafts right, wrong, cut by budget, by max_tokens, and by stop tokens;
    results that arrive when later steps have been scheduled."""
    rng = random.Random(seed)
    vocab, block_size, max_num_seqs = 50, rng.choice([1, 2, 4]), 3
    speculative = SpeculativeConfig(method, num_drafts)
    config = VllmConfig(
        cache_config=CacheConfig(block_size=block_size),
        parallel_config=ParallelConfig(pipeline_parallel_size=stages),
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        speculative_config=speculative,
    )
    scheduler = (AsyncScheduler if asynchronous else Scheduler)(config, num_blocks)
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, DraftTokenIds]] = deque()
    model = SpeculatingModel(
        vocab, block_size, num_blocks, max_num_seqs, budget,
        num_drafts=num_drafts, lookahead=speculative.num_lookahead_tokens, rng=rng,
    )  # fmt: skip
    model.scheduler_runs_ahead = asynchronous
    room = (num_blocks - 1) * block_size + 1
    got: dict[str, list[int]] = {}
    wanted: dict[str, list[int]] = {}
    ended: set[str] = set()
    for now in range(3000):
        if len(wanted) < 6 and rng.random() < 0.5:
            req_id = f"r{len(wanted)}"
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 10))]
            params = SamplingParams(
                max_tokens=rng.randint(1, max(1, min(20, room - len(prompt)))),
                stop_token_ids=[rng.randrange(vocab) for _ in range(3)],
            )
            if len(prompt) + (params.max_tokens or 0) - 1 > room - 1:
                continue
            scheduler.add_request(Request(req_id, prompt, params, params.max_tokens or 0, frozenset({7})))
            got[req_id], wanted[req_id] = [], expected_tokens(prompt, params, vocab, frozenset({7}), 10_000)
        elif got and rng.random() < 0.02:
            ended.update(scheduler.finish_requests([rng.choice(list(got))], RequestStatus.FINISHED_ABORTED))
        if not scheduler.has_requests() and not in_flight:
            if len(wanted) == 6:
                break
            continue
        step = scheduler.schedule()
        if model.execute_model(step) is None:
            result = model.sample_tokens()
            in_flight.append((step, result, DraftTokenIds(list(model.drafts), list(model.drafts.values()))))
        if in_flight and (len(in_flight) >= stages + asynchronous or not step.num_scheduled_tokens):
            step, result, drafts = in_flight.popleft()
            for output in scheduler.update_from_output(step, result):
                got[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert got[output.request_id] == wanted[output.request_id]
            scheduler.update_draft_token_ids(drafts)
        scheduler.check_invariants()
        assert now < 2990, "the scheduler makes no progress"
    for req_id, tokens in got.items():
        assert tokens == wanted[req_id] or (req_id in ended and tokens == wanted[req_id][: len(tokens)])
    assert scheduler.spec_decoding_stats is not None
    # Those of a request that ended or was aborted meanwhile are not counted.
    counted = scheduler.spec_decoding_stats.num_draft_tokens
    assert counted <= model.verified and (asynchronous or stages > 1 or counted == model.verified)


# --- what is refused


def test_what_is_not_valid_is_refused_by_name_before_any_process_starts(tmp_path: Path) -> None:
    other = make_random_checkpoint(tmp_path / "small", **PRESETS["qwen3-gqa1"])
    config_file = other / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"vocab_size": 1000}))
    good = NGRAM
    for kwargs, text in (
        ({"speculative_config": "ngram"}, "a dict with method"),
        ({"speculative_config": good | {"prompt_lookup": 3}}, "'prompt_lookup' is not known"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "method=None is not supported; use 'ngram' or"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, "method='eagle'"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens=None"),
        ({"speculative_config": good | {"num_speculative_tokens": 0}}, "num_speculative_tokens=0"),
        ({"speculative_config": good | {"prompt_lookup_min": 9}}, "prompt_lookup_min=9"),
        ({"speculative_config": good | {"model": TARGET}}, "takes no model"),
        ({"speculative_config": SAME | {"prompt_lookup_max": 2}}, "prompt_lookup_max is for method='ngram' only"),
        ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}, "needs model"),
        ({"speculative_config": SAME | {"model": "/nowhere"}}, "'/nowhere' is not a directory"),
        ({"speculative_config": SAME | {"model": other}}, "a vocabulary of 1000 tokens, the target model one of 2048"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            EngineArgs.from_kwargs(**kwargs).create_engine_config()
        assert text in str(caught.value)


def test_lookup_bounds_that_are_left_out() -> None:
    def bounds(**given: int) -> tuple[int, int]:
        config = {"method": "ngram", "num_speculative_tokens": 2, **given}
        made = EngineArgs.from_kwargs(speculative_config=config).create_engine_config().speculative_config
        assert made is not None
        return made.prompt_lookup_min, made.prompt_lookup_max

    assert bounds() == (5, 5)
    assert bounds(prompt_lookup_max=3) == (3, 3)
    assert bounds(prompt_lookup_min=2) == (2, 2)
    assert bounds(prompt_lookup_max=4, prompt_lookup_min=2) == (2, 4)
