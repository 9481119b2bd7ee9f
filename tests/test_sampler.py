"""Each sampling parameter against its plain definition; distributions by chi-square; independence of the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.core.sched.output import NewRequestData
from minivllm.sampling_params import SamplingParams
from minivllm.worker.gpu.input_batch import InputBatch
from minivllm.worker.gpu.sample.gumbel import gumbel_noise, gumbel_sample
from minivllm.worker.gpu.sample.logprob import compute_topk_logprobs
from minivllm.worker.gpu.sample.min_p import apply_min_p
from minivllm.worker.gpu.sample.sampler import Sampler
from minivllm.worker.gpu.sample.states import derive_seed
from minivllm.worker.gpu.sample.top_k_top_p import apply_top_k_top_p
from minivllm.worker.gpu.states import RequestState

CPU = torch.device("cpu")
VOCAB = 50
EOS = [3]


class Bench:
    """A sampler with its slots, and batches made by hand."""

    def __init__(self, max_num_reqs: int = 8, vocab_size: int = VOCAB, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.states = RequestState(max_num_reqs, 64, CPU)
        self.sampler = Sampler(max_num_reqs, vocab_size, CPU, self.states, EOS, seed)

    def add(
        self, req_id: str, params: SamplingParams, prompt: list[int], output: list[int] | None = None
    ) -> None:
        """Add a request that has generated `output` already."""
        tokens = prompt + (output or [])
        slot = self.states.add_request(req_id, len(prompt), tokens, 0)
        self.sampler.add_request(slot, NewRequestData(req_id, prompt, tokens, params, [], 0))
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def batch(self, req_ids: list[str], unsampled: tuple[str, ...] = ()) -> InputBatch:
        slots = np.array([self.states.req_id_to_index[r] for r in req_ids])
        lens = self.states.prefill_len.np[slots].astype(np.int64)
        sampled = np.array([r not in unsampled for r in req_ids])
        n = len(req_ids)
        empty = torch.empty(0)
        return InputBatch(
            req_ids, n, n, torch.from_numpy(slots), slots, np.ones(n), np.arange(n + 1), torch.from_numpy(lens), lens,
            empty, empty, empty, None, sampled, bool(sampled.all()),
        )  # fmt: skip

    def sample(self, logits: torch.Tensor, req_ids: list[str]) -> list[int]:
        with torch.inference_mode():
            return self.sampler(logits.clone(), self.batch(req_ids)).sampled_token_ids.tolist()


def softmax(logits: torch.Tensor) -> list[float]:
    return logits.double().softmax(-1).tolist()


def random_logits(n: int = 1, vocab_size: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def allowed(logits: torch.Tensor) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits.numpy()]


def reference_top_k_top_p(logits: list[float], k: int, p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:k]
    exps = [math.exp(logits[i]) for i in order]
    total, mass, kept = sum(exps), 0.0, set()
    for i, e in zip(order, exps, strict=True):
        kept.add(i)
        mass += e / total
        if mass >= p:
            break
    return kept


@pytest.mark.parametrize(
    ("k", "p"), [(1, 1.0), (5, 1.0), (VOCAB, 0.5), (7, 0.8), (VOCAB, 0.01), (VOCAB, 0.999)]
)
def test_top_k_top_p(k: int, p: float) -> None:
    logits = random_logits(20)
    expected = [reference_top_k_top_p(row, k, p) for row in logits.double().tolist()]
    top_k = None if k == VOCAB else torch.full((20,), k, dtype=torch.int32)
    top_p = None if p == 1 else torch.full((20,), p)
    apply_top_k_top_p(logits, top_k, top_p, k)
    assert allowed(logits) == expected


def test_top_k_top_p_differ_by_row() -> None:
    logits = random_logits(3)
    before = logits.clone()
    apply_top_k_top_p(logits, torch.tensor([2, VOCAB, 4]), torch.tensor([1.0, 0.6, 0.3]), VOCAB)
    rows = before.double().tolist()
    assert allowed(logits) == [
        reference_top_k_top_p(rows[0], 2, 1.0),
        reference_top_k_top_p(rows[1], VOCAB, 0.6),
        reference_top_k_top_p(rows[2], 4, 0.3),
    ]
    kept = logits.isfinite()
    assert torch.equal(logits[kept], before[kept])


def test_top_p_needs_many_candidates() -> None:
    """A flat distribution, whose kept set is larger than what is looked at first, next to a peaked one."""
    logits = random_logits(3, 5000, scale=0.5)
    logits[1, 17] = 30.0
    before = logits.double().tolist()
    apply_top_k_top_p(logits, None, torch.tensor([0.9, 0.9, 1.0]), 5000)
    assert allowed(logits)[:2] == [reference_top_k_top_p(before[0], 5000, 0.9), {17}]
    assert len(allowed(logits)[2]) == 5000


def test_equal_logits_at_the_limit_are_kept() -> None:
    """Otherwise the result would depend on how many candidates other rows need."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    company = torch.cat((logits, logits))
    apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([0.99]), 2)
    apply_top_k_top_p(company, torch.tensor([2, 4]), torch.tensor([0.99, 1.0]), 4)
    assert allowed(logits) == [{0, 1, 2}] == allowed(company)[:1]


def test_min_p() -> None:
    logits = random_logits(4)
    min_p = [0.0, 0.05, 0.5, 1.0]
    probabilities = logits.double().softmax(-1)
    apply_min_p(logits, torch.tensor(min_p))
    for row, (probs, m) in enumerate(zip(probabilities, min_p, strict=True)):
        assert allowed(logits)[row] == {
            i for i, q in enumerate(probs.tolist()) if q >= m * float(probs.max())
        }


def chi_square(counts: list[int], probabilities: list[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom, cells with few expected counts joined."""
    total = sum(counts)
    statistic, cells, rest_count, rest_expected = 0.0, 0, 0, 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        expected = total * probability
        if expected < 8:
            rest_count, rest_expected = rest_count + count, rest_expected + expected
        else:
            statistic, cells = statistic + (count - expected) ** 2 / expected, cells + 1
    if rest_expected:
        statistic, cells = statistic + (rest_count - rest_expected) ** 2 / rest_expected, cells + 1
    return statistic, cells - 1


def assert_distribution(tokens: torch.Tensor, probabilities: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    assert all(probability > 0 for count, probability in zip(counts, probabilities, strict=True) if count)
    statistic, degrees = chi_square(counts, probabilities)
    # Wilson and Hilferty's approximation of the 99.99 % quantile; seeds are fixed, so this passes or fails for ever.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (statistic, limit)


@pytest.mark.parametrize("vary", ["seed", "position", "derived seed"])
def test_distribution_over(vary: str) -> None:
    """Noise is good over neighbouring seeds, over the positions of one request, and over derived seeds."""
    n = 20000
    logits = random_logits(1, 24).expand(n, -1)
    numbers = torch.arange(n)
    seeds = {
        "seed": numbers,
        "position": torch.full((n,), 1234),
        "derived seed": torch.tensor([derive_seed(0, str(i)) for i in range(n)]),
    }[vary]
    positions = numbers if vary == "position" else torch.full((n,), 17)
    tokens = gumbel_sample(logits.clone(), torch.ones(n), seeds, positions)
    assert_distribution(tokens, softmax(logits[0]))


def test_noise_is_gumbel_and_uncorrelated() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200) * 3, 2048).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    for other in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(7, 1)):
        assert abs(float(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1])) < 0.01


def test_large_vocabulary() -> None:
    """More tokens than 16 bits can count: the first and the last are drawn as often as they should be."""
    n, vocab_size = 800, 70000
    logits = torch.full((1, vocab_size), -20.0)
    logits[0, [0, 65535, 65536, vocab_size - 1]] = torch.tensor([0.0, 1.0, 0.5, 1.5])
    tokens = torch.cat(
        [
            gumbel_sample(
                logits.repeat(100, 1), torch.ones(100), torch.arange(s, s + 100), torch.zeros(100).long()
            )
            for s in range(0, n, 100)
        ]
    )
    assert_distribution(tokens, softmax(logits[0]))


def test_temperature_top_k_top_p_min_p_together() -> None:
    """The distribution of the sampler as a whole, over seeds."""
    n = 3000
    logits = random_logits(1, scale=0.6)
    params = {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.02}
    bench = Bench(max_num_reqs=n)
    for i in range(n):
        bench.add(str(i), SamplingParams(**params, seed=i), [1])
    tokens = torch.tensor(bench.sample(logits.expand(n, -1), [str(i) for i in range(n)]))
    scaled = logits[0].double() / 0.7
    probabilities = scaled.softmax(-1)
    kept = {i for i, q in enumerate(probabilities.tolist()) if q >= 0.02 * float(probabilities.max())}
    masked = [float(x) if i in kept else -math.inf for i, x in enumerate(scaled)]
    kept &= reference_top_k_top_p(masked, 8, 0.9)
    assert 1 < len(kept) < 8
    target = torch.tensor([float(x) if i in kept else -math.inf for i, x in enumerate(scaled)])
    assert_distribution(tokens, softmax(target))


def test_tokens_do_not_depend_on_the_batch() -> None:
    """A request with a seed gets the same token alone, in any company, at any place, in any slot."""
    logits = random_logits(6, seed=5)
    mine = SamplingParams(temperature=1.3, top_p=0.95, seed=99)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(seed=99),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(temperature=0, logprobs=2, logit_bias={5: 100.0}),
    ]
    answers = set()
    for trial in range(10):
        bench = Bench()
        ids = ["mine", *(f"other{i}" for i in range(5))]
        random.Random(trial).shuffle(ids)
        for req_id in ids:
            bench.add(req_id, mine if req_id == "mine" else others[int(req_id[-1])], [7, 8])
        subset = [r for r in ids if r == "mine" or random.Random(f"{trial}{r}").random() < 0.6]
        rows = torch.stack([logits[0] if r == "mine" else logits[1 + int(r[-1])] for r in subset])
        answers.add(bench.sample(rows, subset)[subset.index("mine")])
    assert len(answers) == 1


def test_greedy_rows_stay_greedy_in_a_random_batch() -> None:
    bench = Bench()
    bench.add("greedy", SamplingParams(temperature=0, top_k=1, min_p=0.5), [1])
    bench.add("random", SamplingParams(temperature=5.0, seed=1), [1])
    logits = random_logits(2, scale=0.01)
    assert bench.sample(logits, ["greedy", "random"])[0] == int(logits[0].argmax())


def test_seeds() -> None:
    """No seed: from the engine's seed and the request id; other seeds give other tokens; 64 bits all count."""

    def draw(engine_seed: int, req_id: str, seed: int | None) -> list[int]:
        bench = Bench(seed=engine_seed)
        tokens = []
        for n in range(20):
            bench.add(req_id, SamplingParams(seed=seed, temperature=3.0), [1], [2] * n)
            tokens += bench.sample(random_logits(), [req_id])
            bench.states.remove_request(req_id)
        return tokens

    runs: list[tuple[int, str, int | None]] = [
        (0, "a", None), (0, "b", None), (1, "a", None), (0, "a", 0), (0, "a", 1), (0, "a", -1),
        (0, "a", 1 << 62), (0, "a", -(1 << 63)), (0, "a", (1 << 63) - 1), (0, "a", 1 << 32),
    ]  # fmt: skip
    answers = [draw(*run) for run in runs]
    assert answers == [draw(*run) for run in runs]
    assert len({tuple(a) for a in answers}) == len(runs)
    # An explicit seed is all that counts.
    assert draw(5, "z", 1) == draw(0, "a", 1)


def reference_penalties(
    logits: list[float], prompt: list[int], output: list[int], params: Any
) -> list[float]:
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        result.append(value)
    return result


def test_penalties_follow_the_output() -> None:
    """Counts start from what was generated before a preemption and grow with each token; slots are reused clean."""
    bench = Bench(max_num_reqs=3)
    rng = random.Random(0)
    for round_ in range(4):
        params = [
            SamplingParams(temperature=0, repetition_penalty=1.7),
            SamplingParams(temperature=0, frequency_penalty=0.9, presence_penalty=-0.4),
            SamplingParams(temperature=0, presence_penalty=1.5, repetition_penalty=0.8),
        ]
        ids = [f"{round_}-{i}" for i in range(3)]
        prompts = [[rng.randrange(VOCAB) for _ in range(6)] for _ in range(3)]
        outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(4))] for _ in range(3)]
        for req_id, p, prompt, output in zip(ids, params, prompts, outputs, strict=True):
            bench.add(req_id, p, prompt, output)
        for step in range(12):
            logits = random_logits(3, seed=100 * round_ + step, scale=0.7)
            expected = [
                int(np.argmax(reference_penalties(row, prompt, output, p)))
                for row, prompt, output, p in zip(logits.tolist(), prompts, outputs, params, strict=True)
            ]
            tokens = bench.sample(logits, ids)
            assert tokens == expected
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        for req_id in ids:
            bench.states.remove_request(req_id)


def test_tokens_of_unfinished_prompts_are_not_counted() -> None:
    bench = Bench()
    bench.add("a", SamplingParams(temperature=0, frequency_penalty=1.0), [1, 2])
    batch = bench.batch(["a"], unsampled=("a",))
    bench.sampler(random_logits(), batch)
    assert int(bench.sampler.penalties_state.output_counts.sum()) == 0


def test_logit_bias_and_min_tokens() -> None:
    bench = Bench()
    logits = torch.zeros(4, VOCAB)
    logits[:, 3] = 9.0  # eos
    logits[:, 4] = 8.0
    bench.add("bias", SamplingParams(temperature=0, logit_bias={7: 20.0, 3: -100.0, 10**9: 5.0}), [1])
    bench.add("short", SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4]), [1], [5])
    bench.add("long", SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4]), [1], [5, 5])
    bench.add("plain", SamplingParams(temperature=0), [1])
    assert bench.sample(logits, ["bias", "short", "long", "plain"]) == [7, 0, 3, 3]
    assert bench.sample(logits, ["short", "plain", "bias", "long"]) == [0, 3, 7, 3]


def test_bad_words() -> None:
    """Only a word's last token is forbidden, and only after its other tokens have been generated."""
    words = [[9], [5, 6, 7], [2, 8]]
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 7, 8, 0]] = torch.tensor([4.0, 3.0, 2.0, 1.0])

    def next_token(prompt: list[int], output: list[int]) -> int:
        bench = Bench()
        bench.add("other", SamplingParams(temperature=0), [1])
        bench.add(
            "a", SamplingParams(temperature=0, bad_words=["x"], bad_words_token_ids=words), prompt, output
        )
        return bench.sample(logits.repeat(2, 1), ["other", "a"])[1]

    assert next_token([1], []) == 7
    assert next_token([1], [5, 6]) == 8
    assert next_token([5], [6]) == 7
    assert next_token([1, 5, 6], []) == 7
    assert next_token([1], [1, 5, 6, 5, 6]) == 8
    assert next_token([1], [2]) == 7
    logits[0, 7] = -1
    assert next_token([1], [2]) == 0
    assert next_token([1], [2, 3]) == 8


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Neither penalties nor temperature change them; each request gets as many as it asked for."""
    bench = Bench()
    bench.add("a", SamplingParams(temperature=0, logprobs=4, logit_bias={11: 50.0}), [1])
    bench.add("none", SamplingParams(temperature=0), [1])
    bench.add("zero", SamplingParams(temperature=2.0, seed=3, logprobs=0), [1])
    logits = random_logits(3)
    expected = logits.log_softmax(-1)
    with torch.inference_mode():
        output = bench.sampler(logits.clone(), bench.batch(["a", "none", "zero"]))
    assert set(output.logprobs) == {"a", "zero"}
    a, zero = output.logprobs["a"], output.logprobs["zero"]
    assert a.token_ids.shape == (1, 5) and a.token_ids[0, 0] == 11
    top = expected[0].topk(4)
    assert a.token_ids[0, 1:].tolist() == top.indices.tolist()
    torch.testing.assert_close(a.logprobs[0], torch.cat((expected[0, 11:12], top.values)))
    assert a.ranks.tolist() == [int((expected[0] >= expected[0, 11]).sum())]
    token = int(output.sampled_token_ids[2])
    assert zero.token_ids.tolist() == [[token]]
    torch.testing.assert_close(zero.logprobs[0, 0], expected[2, token])


def test_ranks_count_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    assert compute_topk_logprobs(logits, 0, torch.tensor([2])).ranks.tolist() == [3]
    assert compute_topk_logprobs(logits, 0, torch.tensor([1])).ranks.tolist() == [2]


def test_a_greedy_batch_takes_the_lowest_of_equal_logits() -> None:
    bench = Bench()
    bench.add("a", SamplingParams(temperature=0), [1])
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 30]] = 1.0
    assert bench.sample(logits, ["a"]) == [20]
