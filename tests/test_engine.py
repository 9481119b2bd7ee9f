"""The engine over a worker without torch: every path of client, EngineCore and executor, and its answers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from counting_model import expected_tokens

from minivllm import LLM, SamplingParams
from minivllm.config import ModelConfig
from minivllm.engine import EngineCoreRequest
from minivllm.engine.core_client import InprocClient
from minivllm.exceptions import EngineDeadError, RemoteError, RequestError

MODEL = ModelConfig()
MAX_LEN = 200


def start(backend: str = "uni", **kwargs: Any) -> LLM:
    kwargs.setdefault("max_model_len", MAX_LEN)
    kwargs.setdefault("max_num_seqs", 4)
    if backend == "mp":
        kwargs.setdefault("tensor_parallel_size", 2)
    return LLM(
        worker_cls="counting_worker.CountingWorker",
        distributed_executor_backend=backend,
        device="cpu",
        **kwargs,
    )


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    return expected_tokens(prompt, params, MODEL.vocab_size, frozenset(MODEL.eos_token_ids), MAX_LEN)


def all_slots_become_free(llm: LLM) -> None:
    """The workers hear of a request's end with the next step, which may come after the client has its output."""
    deadline = time.monotonic() + 5
    while any(llm.collective_rpc("open_slots")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module", params=["inproc-uni", "inproc-mp", "proc-uni", "proc-mp"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    process, backend = request.param.split("-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "1" if process == "proc" else "0")
        with start(backend, num_gpu_blocks_override=40, max_num_batched_tokens=48) as llm:
            yield llm


def test_tokens_of_many_requests(llm: LLM) -> None:
    """Chunked prefill, queueing and preemption at once; each request is answered as if it were alone."""
    prompts = [[(7 * i + j) % 2048 for j in range(1 + 9 * i % 80)] for i in range(40)]
    params = [SamplingParams(max_tokens=1 + i * 5 % 60, ignore_eos=i % 2 == 0) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == expected(prompt, sampling)
        assert output.finished and output.outputs[0].finished()
    all_slots_become_free(llm)


def test_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    text = "def make_worker_process("
    one = llm.generate(text, params)[0]
    assert one.prompt == text and one.prompt_token_ids
    ids = one.prompt_token_ids
    for prompts in (
        ids,
        [ids],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        {"prompt": text},
        (text,),
    ):
        again = llm.generate(prompts, params)
        assert len(again) == 1
        assert again[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert llm.generate([], params) == []
    assert llm.generate(text)[0].outputs[0].finish_reason == "length"


def test_text_and_finish_reasons(llm: LLM) -> None:
    prompt = [5, 6, 7]
    free = expected(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode(free)
    full = llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0].outputs[0]
    assert full.text == tokenizer.decode(prompt + free)[len(tokenizer.decode(prompt)) :]
    assert (full.finish_reason, full.stop_reason) == ("length", None)

    stop = text[len(text) // 2 :][:4]
    cut = llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, stop=stop))[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert stop not in cut.text and full.text.startswith(cut.text)
    assert len(cut.token_ids) < 30

    by_token = llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[free[4]]))[
        0
    ]
    assert by_token.outputs[0].token_ids == free[: free.index(free[4]) + 1]
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", free[4])


def test_the_models_length_ends_a_request(llm: LLM) -> None:
    prompt = [1] * (MAX_LEN - 4)
    output = llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 4 and output.finish_reason == "length"


def test_logprobs_reach_the_user(llm: LLM) -> None:
    prompt = list(range(20))
    output = llm.generate(prompt, SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=1))[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    assert completion.cumulative_logprob == pytest.approx(-0.5 * len(completion.token_ids))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in output.prompt_logprobs[1:] if position] == prompt[1:]
    first = completion.logprobs[0][completion.token_ids[0]]
    assert first.rank == 1 and first.decoded_token == llm.get_tokenizer().decode([completion.token_ids[0]])


def test_bad_requests_are_refused_before_any_starts(llm: LLM) -> None:
    steps = llm.collective_rpc("pid")
    good = [1, 2, 3]
    for bad, text in (
        ([], "empty"),
        ("", "empty"),
        ([1] * MAX_LEN, "max_model_len"),
        ([2048], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([1.5], "integers"),
        ([True, 1], "integers"),
        (None, "a prompt is a string"),
        ({"text": "x"}, "needs 'prompt'"),
        ("\ud800", "tokenized"),
    ):
        with pytest.raises(RequestError, match=text) as error:
            llm.generate([good, bad])
        assert "prompt 1" in str(error.value)
    for bad_params, text in (
        ({"temperature": 0}, "SamplingParams"),
        ([SamplingParams()], "1 sampling_params were given for 2"),
    ):
        with pytest.raises(RequestError, match=text):
            llm.generate([good, good], bad_params)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.collective_rpc("pid") == steps
    assert llm.generate(good, SamplingParams(max_tokens=2))[0].finished


def test_engine_core_refuses_a_bad_request_alone(llm: LLM) -> None:
    """Whatever a client sends: that request fails, the others go on."""
    engine = llm.llm_engine
    good = engine.process_input("good", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add_request(*good)
    bad = EngineCoreRequest("bad", [1] * (MAX_LEN + 5), SamplingParams(max_tokens=5))

    def add_and_run() -> None:
        engine.add_request(None, bad)
        while engine.has_unfinished_requests():
            engine.step()

    with pytest.raises(RequestError, match="max_model_len"):
        add_and_run()
    engine.abort_requests(["bad"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] in (["good"], [])


def test_engine_core_survives_garbage(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    if isinstance(client, InprocClient):
        pytest.skip("there is no wire")
    for garbage in (b"\x00", b"\x00\xc1", b"\x00\x93\xa1x\x01\x02", b"\x00\x90"):
        client.resources.socket.send(garbage)  # type: ignore[attr-defined]
    assert llm.generate([1, 2], SamplingParams(max_tokens=2))[0].finished


def test_a_step_without_requests_returns_at_once(llm: LLM) -> None:
    assert llm.llm_engine.step() == []


def test_collective_rpc(llm: LLM) -> None:
    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    assert llm.collective_rpc("echo", args=({"a": [1, b"x"]},)) == [{"a": [1, b"x"]}] * ranks
    assert llm.collective_rpc("echo", kwargs={"value": 3}) == [3] * ranks
    offset = 10
    assert llm.collective_rpc(lambda worker, x: worker.rank + offset + x, args=(1,)) == [11, 12][:ranks]
    assert llm.collective_rpc("check_health") == [None] * ranks
    big = os.urandom(3 << 20)
    assert llm.collective_rpc("echo", args=(big,)) == [big] * ranks


def test_an_error_in_a_worker_reaches_the_caller_and_harms_nobody(llm: LLM) -> None:
    last = llm.llm_engine.vllm_config.parallel_config.world_size - 1
    with pytest.raises((RemoteError, LookupError), match="told to fail"):
        llm.collective_rpc("fail_on", args=(last,))
    with pytest.raises((RemoteError, AttributeError), match="no_such_method"):
        llm.collective_rpc("no_such_method")
    assert llm.collective_rpc("echo", args=(1,)) == [1] * (last + 1)
    assert llm.generate([1, 2], SamplingParams(max_tokens=2))[0].finished


def test_abort(llm: LLM) -> None:
    engine = llm.llm_engine
    # With a stop string, so that the tokens of each step come when they are there.
    for name, stop in (("x", ["no such text"]), ("y", None)):
        params = SamplingParams(max_tokens=150, ignore_eos=True, stop=stop)
        engine.add_request(*engine.process_input(name, [1, 2, 3], params))
    for _ in range(3):
        engine.step()
    aborted = engine.abort_requests(["x", "unknown"])
    assert [o.request_id for o in aborted] == ["x"] and aborted[0].outputs[0].finish_reason == "abort"
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.request_id for o in outputs] == ["y"]
    assert outputs[0].outputs[0].token_ids == expected(
        [1, 2, 3], SamplingParams(max_tokens=150, ignore_eos=True)
    )
    all_slots_become_free(llm)


def test_tokens_come_as_soon_as_the_client_looks_for_stop_strings_in_them(llm: LLM) -> None:
    engine = llm.llm_engine
    stop = SamplingParams(max_tokens=30, ignore_eos=True, stop=["no such text"])
    engine.add_request(*engine.process_input("z", [1, 2, 3], stop))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert steps >= 30
    all_slots_become_free(llm)


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    ranks = llm.llm_engine.vllm_config.parallel_config.world_size
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(llm.generate, [[9, 9]] * 6, params, False)
        calls = [pool.submit(llm.collective_rpc, "echo", None, (i,)) for i in range(20)]
        assert [call.result(30) for call in calls] == [[i] * ranks for i in range(20)]
        outputs = running.result(30)
    assert all(output.outputs[0].token_ids == expected([9, 9], params) for output in outputs)


def test_two_threads_may_generate(llm: LLM) -> None:
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda i: llm.generate([[i], [i, i]], params, False), range(6)))
    for i, (first, second) in enumerate(outputs):
        assert first.outputs[0].token_ids == expected([i], params)
        assert second.outputs[0].token_ids == expected([i, i], params)


def test_thousands_of_requests_at_once() -> None:
    """More than any queue of the channel holds by default."""
    with start("uni", max_num_seqs=64) as llm:
        outputs = llm.generate(
            [[i % 2048] for i in range(3000)], SamplingParams(max_tokens=1), use_tqdm=False
        )
    assert [output.prompt_token_ids for output in outputs] == [[i % 2048] for i in range(3000)]


def test_in_process_engine_core_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    with start("uni") as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        assert core.model_executor.collective_rpc("echo", args=(1,)) == [1]
        core.scheduler.check_invariants()


def test_what_can_never_fit_the_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    with start("uni", num_gpu_blocks_override=4, block_size=8) as llm:
        with pytest.raises(RequestError, match="4 KV cache blocks of 8 tokens, but only 3 exist"):
            llm.generate([1] * 16, SamplingParams(max_tokens=10))
        # Three blocks hold 24 tokens, and the last one sampled needs no room.
        exact = llm.generate([1] * 16, SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0]
        assert len(exact.token_ids) == 9
        # Without a limit of its own a request gets what there is.
        most = llm.generate([1] * 16, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
        assert len(most.token_ids) == 9 and most.finish_reason == "length"


@pytest.mark.parametrize("process", ["0", "1"])
def test_shutdown_is_final_and_idempotent(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", process)
    llm = start("uni")
    before = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - before < 0.5
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([1])
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.collective_rpc("echo", args=(1,))


def test_dropping_the_last_reference_ends_the_processes() -> None:
    llm = start("mp")
    engine_core = psutil.Process(llm.llm_engine.engine_core.resources.process.pid)  # type: ignore[attr-defined]
    family = [engine_core, *engine_core.children(recursive=True)]
    assert len(family) >= 3
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    _, alive = psutil.wait_procs(family, timeout=2)
    assert not alive


def test_two_engines_side_by_side() -> None:
    with start("uni") as first, start("mp") as second:
        params = SamplingParams(max_tokens=5)
        assert first.generate([3, 4], params)[0].outputs == second.generate([3, 4], params)[0].outputs


def test_no_socket_file_is_left_not_even_while_the_engine_runs() -> None:
    import tempfile

    with start("uni"):
        assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("minivllm-engine-")]


def test_idle_engine_uses_no_cpu() -> None:
    with start("uni") as llm:
        engine_core = psutil.Process(llm.llm_engine.engine_core.resources.process.pid)  # type: ignore[attr-defined]
        llm.generate([1, 2], SamplingParams(max_tokens=3))
        time.sleep(0.5)
        before = engine_core.cpu_times()
        time.sleep(1)
        after = engine_core.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.02


def test_progress_is_reported() -> None:
    lines: list[str] = []
    start("uni", on_progress=lines.append).shutdown()
    assert lines and all(": " in line for line in lines)


def test_no_torch_in_client_and_engine_core() -> None:
    with start("uni") as llm:
        assert llm.collective_rpc(lambda worker: "torch" in sys.modules) == [False]


_OWN_CLASSES = """
import dataclasses, enum, os, sys
from minivllm import LLM

@dataclasses.dataclass
class Found:
    rank: int
    def seen(self):
        return LIMIT

LIMIT = 5
Colour = enum.Enum("Colour", "RED")
seen = Found.seen

if __name__ == "__main__":
    class Late(Found):
        pass

    for processes, tp in (("1", 2), ("0", 2), ("1", 1)):
        os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = processes
        with LLM(tensor_parallel_size=tp, device="cpu", worker_cls="counting_worker.CountingWorker") as llm:
            results = llm.collective_rpc(lambda worker: (Found(worker.rank), Late(worker.rank), Colour.RED))
            assert [found for found, *_ in results] == [Found(rank) for rank in range(tp)], results
            assert all(type(late) is Late and red is Colour.RED for _, late, red in results), results
            assert Found.seen is seen, "the class is as it was"
            try:
                llm.collective_rpc(lambda worker: sys._getframe())
            except Exception as error:
                assert "cannot pickle 'frame' object" in str(error), error
            # Arguments, too: a worker knows the one class from the script, and would find the other nowhere.
            for thing in (Found(7), Late(7)):
                same = llm.collective_rpc(lambda worker, it, more: (it == more, isinstance(it, Found), it), args=(thing, ), kwargs={"more": thing})
                assert same == [(True, True, thing)] * tp and type(same[0][2]) is type(thing), same
                assert llm.collective_rpc("echo", args=(thing,)) == [thing] * tp
            try:
                llm.collective_rpc("echo", args=(sys._getframe(),))
            except Exception as error:
                assert "cannot pickle 'frame' object" in str(error) or (processes, tp) == ("0", 1), error
            assert llm.collective_rpc("check_health") == [None] * tp
    print("good")
"""


def test_results_and_arguments_are_of_the_classes_of_the_script_that_asks(tmp_path: Path) -> None:
    """A worker has copies of them, which pickle finds under no name there."""
    script = tmp_path / "script.py"
    script.write_text(_OWN_CLASSES)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr
