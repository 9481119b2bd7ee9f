"""Workers without an engine: one in this process or several in spawned ones, and a small scheduler to drive them.

The scheduler here does on purpose what the real one does seldom: chunk prompts, mix, preempt at a chosen step.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import warm_processes

from minivllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from minivllm.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.kv_cache_interface import KVCacheConfig
from minivllm.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from minivllm.sampling_params import SamplingParams

LIMIT_S = 120.0


def make_config(
    model: str | None,
    tp: int = 1,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    max_model_len: int | None = 256,
    block_size: int = 16,
    seed: int = 0,
    **model_kwargs: Any,
) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=model, max_model_len=max_model_len, seed=seed, **model_kwargs),
        cache_config=CacheConfig(block_size=block_size, kv_cache_memory_bytes=8 << 20),
        parallel_config=ParallelConfig(tensor_parallel_size=tp),
        scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
    )


def rendezvous() -> str:
    """A new file:// rendezvous in the temporary directory."""
    handle, path = tempfile.mkstemp(prefix="rdzv-")
    os.close(handle)
    os.unlink(path)
    return f"file://{path}"


def bring_up(config: VllmConfig, rank: int, init_method: str, num_blocks: int | None = None) -> Any:
    """A worker that is ready for its first step."""
    from minivllm.worker.gpu_worker import Worker

    worker = Worker(config, rank, rank, init_method, rank == 0)
    try:
        worker.init_device()
        worker.load_model()
        spec = worker.get_kv_cache_spec()
        available = worker.determine_available_memory()
        blocks = num_blocks or available // sum(s.page_size_bytes for s in spec.values())
        worker.initialize_from_config(KVCacheConfig(blocks, spec))
        worker.compile_or_warm_up_model()
    except BaseException:
        worker.shutdown()
        raise
    return worker


def _step(worker: Any, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    output = worker.execute_model(scheduler_output)
    if output is None:
        output = worker.sample_tokens(None)
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


class LocalWorker:
    """One worker in this process."""

    def __init__(self, config: VllmConfig, num_blocks: int | None = None) -> None:
        self.config = config
        self.worker = bring_up(config, 0, rendezvous(), num_blocks)

    def step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return _step(self.worker, scheduler_output)

    def close(self) -> None:
        self.worker.shutdown()


@contextmanager
def local_worker(model: str | None, **kwargs: Any) -> Iterator[LocalWorker]:
    num_blocks = kwargs.pop("num_blocks", None)
    worker = LocalWorker(make_config(model, **kwargs), num_blocks)
    try:
        yield worker
    finally:
        worker.close()


def _serve(rank: int, connection: Connection) -> None:
    """Loop of a rank: bring up a worker, let it step, shut it down, again and again."""
    worker: Any = None
    while True:
        command, *args = connection.recv()
        try:
            if command == "exit":
                return
            if command == "bring_up":
                worker = bring_up(args[0], rank, args[1])
                result: Any = None
            elif command == "step":
                result = _step(worker, args[0])
            elif command == "close":
                worker.shutdown()
                result = None
            else:
                function: Callable[..., Any] = command
                result = function(rank, worker, *args)
            connection.send((True, result))
        except BaseException as e:
            connection.send((False, f"rank {rank}: {type(e).__name__}: {e}\n{traceback.format_exc()}"))


class SpawnedWorkers:
    """`size` processes with one rank each; they stay for several configurations."""

    def __init__(self, size: int) -> None:
        context = warm_processes.context()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, command: Any, *args: Any) -> list[Any]:
        """Run on all ranks at once; returns their results, raises what any of them raised."""
        for connection in self.connections:
            connection.send((command, *args))
        return self.collect()

    def collect(self) -> list[Any]:
        replies = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(LIMIT_S):
                raise TimeoutError(f"rank {rank} did not answer within {LIMIT_S:g} s")
            replies.append(connection.recv())
        failures = [result for ok, result in replies if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for _, result in replies]

    def bring_up(self, config: VllmConfig) -> None:
        self.config = config
        self.call("bring_up", config, rendezvous())

    def step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        outputs = self.call("step", scheduler_output)
        assert all(o == outputs[0] for o in outputs), "the ranks sampled different tokens"
        return outputs[0]

    def shut_down_workers(self) -> None:
        self.call("close")

    def close(self) -> None:
        for connection in self.connections:
            try:
                connection.send(("exit",))
            except OSError:
                pass
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass
class Request:
    req_id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    prompt_logprobs: list[LogprobsLists] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: bool = False  # to the workers

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """A scheduler without policy.

    Args:
        token_budget: tokens per step; smaller than a prompt chunks it.
        preempt_at: steps before which the youngest running request is preempted.
        reverse: schedule the running requests in reverse order, so that the batch's order differs from the slots'.
    """

    def __init__(
        self,
        workers: LocalWorker | SpawnedWorkers,
        token_budget: int = 512,
        preempt_at: tuple[int, ...] = (),
        reverse: bool = False,
        num_blocks: int = 300,
    ) -> None:
        self.workers = workers
        self.token_budget = token_budget
        self.preempt_at = preempt_at
        self.reverse = reverse
        self.block_size = workers.config.cache_config.block_size
        self.max_num_seqs = workers.config.scheduler_config.max_num_seqs
        self.max_model_len = workers.config.model_config.max_model_len
        self.free = list(range(1, num_blocks))
        self.num_steps = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[Request]:
        """Run all to their max_tokens; eos and stop strings are the engine's business."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        requests = [Request(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        waiting, running = list(requests), list[Request]()
        finished: set[str] = set()
        while waiting or running or finished:
            preempted: set[str] = set()
            if self.num_steps in self.preempt_at and running:
                victim = running.pop()
                self.free += victim.blocks
                victim.blocks, victim.computed, victim.known = [], 0, False
                preempted.add(victim.req_id)
                waiting.insert(0, victim)
            while waiting and len(running) < self.max_num_seqs:
                running.append(waiting.pop(0))
            output = self._schedule(running, finished, preempted)
            finished = set()
            result = self.workers.step(output)
            self.num_steps += 1
            by_id = {r.req_id: r for r in running}
            for req_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
                request = by_id[req_id]
                request.computed += output.num_scheduled_tokens[req_id]
                assert bool(tokens) == (request.computed == len(request.tokens))
                request.output += tokens
                if req_id in result.logprobs:
                    request.logprobs.append(result.logprobs[req_id])
                if req_id in result.prompt_logprobs:
                    request.prompt_logprobs.append(result.prompt_logprobs[req_id])
            for request in list(running):
                limit = request.params.max_tokens or self.max_model_len
                if len(request.output) >= limit or len(request.tokens) >= self.max_model_len:
                    running.remove(request)
                    self.free += request.blocks
                    finished.add(request.req_id)
        return requests

    def _schedule(self, running: list[Request], finished: set[str], preempted: set[str]) -> SchedulerOutput:
        output = SchedulerOutput(finished_req_ids=finished, preempted_req_ids=preempted)
        cached = CachedRequestData()
        budget = self.token_budget
        for request in reversed(running) if self.reverse else running:
            count = min(len(request.tokens) - request.computed, budget)
            if count <= 0:
                continue
            budget -= count
            need = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            new_blocks = [self.free.pop(0) for _ in range(need)]
            request.blocks += new_blocks
            if request.known:
                cached.req_ids.append(request.req_id)
                cached.new_block_ids.append(new_blocks or None)
                cached.num_computed_tokens.append(request.computed)
            else:
                request.known = True
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        request.req_id,
                        request.prompt,
                        request.tokens,
                        request.params,
                        list(request.blocks),
                        0,
                    )
                )
            output.num_scheduled_tokens[request.req_id] = count
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output


class Reference:
    """transformers' answers, in float32."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = self.model.generate(
            self.torch.tensor([prompt]),
            attention_mask=self.torch.ones(1, len(prompt), dtype=self.torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tokens[0, len(prompt) :].tolist()

    def logprobs(self, tokens: list[int]) -> Any:
        """`[len(tokens), vocab_size]` log-probabilities of what follows each token."""
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_logprobs_close(rows: LogprobsLists, reference: Any, chosen: list[int], k: int) -> None:
    """Rows must tell `reference` `[n, vocab_size]`: chosen token first, then the k most likely, to 1e-4."""
    assert len(rows.token_ids) == len(rows.logprobs) == len(rows.ranks) == len(chosen) == len(reference)
    for ids, values, rank, expected, token in zip(
        rows.token_ids, rows.logprobs, rows.ranks, reference, chosen, strict=True
    ):
        assert ids[0] == token and len(ids) == k + 1
        for i, value in zip(ids, values, strict=True):
            assert abs(float(expected[i]) - value) < 1e-4
        best = expected.topk(k).values.tolist() if k else []
        assert all(abs(a - b) < 1e-4 for a, b in zip(best, values[1:], strict=True))
        # Tokens closer than float32 can tell apart may stand either side of the chosen one.
        low = int((expected > expected[token] + 1e-4).sum()) + 1
        high = int((expected >= expected[token] - 1e-4).sum())
        assert low <= rank <= high
