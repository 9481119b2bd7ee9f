"""Bad settings and bad sampling arguments: one line that says what is wrong and what would be right, and no process."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import minivllm
from minivllm import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.exceptions import ConfigError, RequestError
from minivllm.tracing.failpoints import never_reached
from minivllm.worker.worker_base import resolve_worker_class


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"xyzzy": 2}, "'xyzzy' is not an engine argument; known are"),
        ({"model": "/no/such/place"}, "not a directory"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size=-1"),
        ({"tensor_parallel_size": 3}, "8 attention heads cannot be divided"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "use 'mp'"),
        ({"distributed_executor_backend": "carrier pigeon"}, "carrier pigeon"),
        ({"distributed_executor_backend": "no.such.Executor"}, "no.such.Executor"),
        ({"distributed_executor_backend": 7}, "7"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "abacus"}, "abacus"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 5000}, "max_model_len=5000"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 10**20}, "max_num_batched_tokens=1000"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "chunked prefill is off"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_gpu_blocks_override": 1}, "null block"),
        ({"seed": "lucky"}, "seed='lucky'"),
        ({"model": ""}, "model='' is not valid"),
        ({"model": 5}, "model=5 is not valid"),
        ({"trace": 5}, "trace=5 is not valid"),
        ({"trace": "/dev/null/x"}, "trace='/dev/null/x' cannot be used"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"trace_level": "rpc"}, "needs a directory"),
        ({"trace": "/tmp", "trace_level": "everything"}, "everything"),
        ({"trace": ""}, "trace='' is not valid"),
        ({"live_step": 5}, "live_step=5 is not valid: True, False or a text of commands"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization=2"),
        (
            {"gpu_memory_utilization": "x"},
            "gpu_memory_utilization='x' is not valid: a number above 0 and up to 1",
        ),
        ({"startup_timeout_s": -1}, "startup_timeout_s=-1 is not valid: a number of seconds above 0"),
        ({"startup_timeout_s": float("nan")}, "startup_timeout_s=nan"),
        ({"startup_timeout_s": "x"}, "startup_timeout_s='x'"),
        ({"max_model_len": 1}, "max_model_len=1 is not valid: .* allows 2"),
        ({"worker_cls": Path}, "worker_cls is the class Path itself: give its name, 'pathlib.Path'"),
        ({"worker_cls": 5}, "worker_cls=5 is not valid: the qualified name of a class"),
        ({"worker_cls": "os.path"}, "worker_cls='os.path' is no class, but a module"),
        (
            {"worker_cls": "nosuch.Mod"},
            "worker_cls='nosuch.Mod' cannot be found: there is no module named 'nosuch'",
        ),
        ({"worker_extension_cls": "Mixin"}, "worker_extension_cls='Mixin' is not valid"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_refused_before_any_process_starts(kwargs: dict[str, Any], text: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    kwargs = {"device": "cpu", **kwargs}
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=text) as error:
        LLM(**kwargs)
    assert "\n" not in str(error.value)
    assert time.monotonic() - begun < 2
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_worker_class_that_only_the_worker_can_look_at_is_refused_there() -> None:
    """Importing it in the client might mean importing torch."""
    config = EngineArgs(device="cpu", worker_cls="wsgiref.simple_server.demo_app").create_engine_config()
    with pytest.raises(ConfigError, match=r"worker_cls='wsgiref.*' is no class, but a function"):
        resolve_worker_class(config)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(EngineArgs)])
def test_a_setting_of_any_type_is_taken_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but ConfigError comes out, whatever somebody passes, and it names the setting."""
    monkeypatch.chdir(tmp_path)
    values: list[Any] = [
        float("nan"),
        float("inf"),
        -1,
        0,
        1.5,
        "x",
        "",
        "a\0b",
        b"x",
        [],
        {},
        [5],
        object(),
        10**30,
        int,
    ]
    refusals = []
    for value in values:
        try:
            EngineArgs(**{"device": "cpu", name: value}).create_engine_config()
        except ConfigError as error:
            refusals.append(str(error))
    assert all(name in text and "\n" not in text for text in refusals)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "does not say which architecture"),
        ({"architectures": 5}, r"config\.json: architectures=5 is not valid"),
        ({"vocab_size": None}, r"config\.json lacks vocab_size"),
        ({"vocab_size": "many"}, r"config\.json: vocab_size='many' is not valid: an integer of at least 1"),
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads=0"),
        ({"head_dim": None, "hidden_size": 30}, r"config\.json lacks head_dim, and hidden_size=30"),
        ({"rms_norm_eps": "small"}, r"config\.json: rms_norm_eps='small'"),
        (
            {"tie_word_embeddings": "yes"},
            r"config\.json: tie_word_embeddings='yes' is not valid: true or false",
        ),
        (
            {"eos_token_id": [0, "x"]},
            r"config\.json: eos_token_id=\[0, 'x'\] is not valid: a token id or a list",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": "yarn"}, r"config\.json: rope_scaling='yarn' is not valid: an object"),
        (
            {"rope_parameters": {"rope_theta": "x"}, "rope_theta": None},
            r"config\.json: rope_parameters=.*rope_theta",
        ),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    config = json.loads((Path(BUNDLED_CHECKPOINT) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=text):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '{"eos_token_id": "x"}',
            r"generation_config\.json: eos_token_id='x' is not valid: a token id or a list",
        ),
        ("[1]", r"generation_config\.json is not a JSON object, but a list"),
        ("{", r"generation_config\.json cannot be read"),
    ],
)
def test_an_unsuitable_generation_config_is_refused(content: str, text: str, tmp_path: Path) -> None:
    shutil.copy(Path(BUNDLED_CHECKPOINT) / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        LLM(tmp_path, device="cpu")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_CHECKPOINT, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        LLM(tmp_path / "model", device="cpu", worker_cls="counting_worker.CountingWorker")


def test_without_a_tokenizer_token_ids_still_work(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_CHECKPOINT, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with LLM(tmp_path / "model", device="cpu", worker_cls="counting_worker.CountingWorker") as llm:
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            llm.generate("text")
        with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
            llm.generate([1], SamplingParams(bad_words=["x"]))
        output = llm.generate([1, 2], SamplingParams(max_tokens=3, logprobs=0))[0]
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"max_token": 3}, "'max_token' is not an argument of SamplingParams; did you mean max_tokens"),
        ({"beam": 3}, "'beam' is not an argument of SamplingParams; known are n, max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -5}, "max_tokens=-5"),
        ({"max_tokens": 2.5}, r"max_tokens=2\.5"),
        ({"min_tokens": 20}, "min_tokens=20 exceeds max_tokens=16"),
        ({"temperature": -1}, "temperature=-1"),
        (
            {"allowed_token_ids": [5]},
            "'allowed_token_ids' is an argument of vLLM's SamplingParams that minivllm does not",
        ),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf is not valid: a finite number of at least 0"),
        ({"ignore_eos": "x"}, "ignore_eos='x' is not valid: True or False"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1 is not valid"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"n": 2}, "n=2"),
        ({"stop": [""]}, "stop="),
        ({"logprobs": 21}, "logprobs=21"),
        ({"seed": 1 << 70}, "seed="),
        ({"max_tokens": 1 << 31}, "max_tokens=2147483648"),
        ({"max_tokens": None, "min_tokens": 10**20}, "min_tokens=1000"),
        ({"top_k": 10**20}, "top_k=1000"),
        ({"stop_token_ids": [1 << 31]}, "stop_token_ids="),
        ({"logit_bias": {10**20: 1.0}}, "logit_bias="),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_sampling_argument_is_named(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**kwargs)


def test_structured_outputs_are_named_as_such() -> None:
    with pytest.raises(
        RequestError, match="'grammar' is an argument of vLLM's StructuredOutputsParams that minivllm"
    ):
        StructuredOutputsParams(grammar="x")
    with pytest.raises(
        RequestError, match="'regexp' is not an argument of StructuredOutputsParams; did you mean regex"
    ):
        StructuredOutputsParams(regexp="x")


def test_a_bad_prompt_or_call_is_named() -> None:
    """And the engine goes on."""
    with LLM(device="cpu", worker_cls="counting_worker.CountingWorker") as llm:
        with pytest.raises(RequestError, match=r"its character 2 is '\\ud800', half of a surrogate pair"):
            llm.generate("ab\ud800")
        for timeout in (-1, float("nan"), float("inf"), "x", True):
            with pytest.raises(
                RequestError, match=f"timeout={timeout!r} is not valid: a number of seconds from 0"
            ):
                llm.collective_rpc("check_health", timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="method=5 is not valid"):
            llm.collective_rpc(5)  # type: ignore[arg-type]
        assert llm.collective_rpc("check_health", timeout=5) == [None]


def test_a_failpoint_of_a_rank_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_FAILPOINTS", "run@client=sleep:0; rpc.execute@rank1=kill")
    EngineArgs(device="cpu", tensor_parallel_size=2).create_engine_config()
    with pytest.raises(
        ConfigError, match=r"'rpc\.execute@rank1=kill' can never act: the run has rank 0 only"
    ):
        EngineArgs(device="cpu").create_engine_config()


def test_a_failpoint_that_nobody_came_to_is_named(
    tmp_path: Path, failpoints: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the trace can tell: of steps of a higher level, and of what a death has made impossible, it cannot."""
    late = "rpc.execute@rank0#999=raise"
    failpoints(f"executor.init@engine=sleep:0; {late}; mq.enqueue#999=kill")
    with LLM(device="cpu", worker_cls="counting_worker.CountingWorker", trace=tmp_path / "trace"):
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"the trace shows no process that came to the failpoint {late}"
    ]
    trace = str(tmp_path / "trace")
    assert never_reached(f"executor.init@engine=sleep:0; {late}", trace, "rpc") == [late]
    (tmp_path / "trace" / "worker").write_text("executor.init@engine=kill")
    assert never_reached(f"executor.init@engine=kill; {late}", trace, "rpc") == []


def test_names_can_be_completed() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput", "__version__"} <= set(dir(minivllm))


def test_every_engine_argument_reaches_the_configuration_or_is_refused(tmp_path: Path) -> None:
    """No argument is accepted and then ignored."""

    def leaves(value: Any) -> list[Any]:
        if dataclasses.is_dataclass(value):
            return [leaf for f in dataclasses.fields(value) for leaf in leaves(getattr(value, f.name))]
        return [value]

    base = EngineArgs(device="cpu").create_engine_config()
    changes: dict[str, Any] = {
        "model": str(BUNDLED_CHECKPOINT) + "/",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_cls": "a.B",
        "worker_extension_cls": "a.B",
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 77,
        "numa_bind": True,
        "startup_timeout_s": 3.5,
        "dtype": "bfloat16",
        "max_model_len": 77,
        "seed": 77,
        "device": "cuda",
        "enforce_eager": True,
        "block_size": 8,
        "gpu_memory_utilization": 0.77,
        "kv_cache_memory_bytes": 77,
        "num_gpu_blocks_override": 77,
        "max_num_seqs": 77,
        "max_num_batched_tokens": 777,
        "enable_chunked_prefill": False,
        "async_scheduling": True,
        "speculative_config": {},
        "logits_processors": ["a:B"],
        "logprobs_mode": "processed_logprobs",
        "trace": str(tmp_path / "trace"),
        "trace_level": "lifecycle",
    }
    assert set(changes) == {f.name for f in dataclasses.fields(EngineArgs)}
    for name, value in changes.items():
        try:
            changed = EngineArgs(**{"device": "cpu", name: value}).create_engine_config()
        except ConfigError:
            continue
        # The instance's id differs always.
        difference = [a for a, b in zip(leaves(base), leaves(changed), strict=True) if a != b]
        assert len(difference) > 1, f"{name} changes nothing"


def test_device_auto_is_cpu_without_a_gpu_or_a_cuda_build() -> None:
    assert EngineArgs().create_engine_config().device in ("cpu", "cuda")


def test_a_trace_directory_in_the_environment_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIVLLM_TRACE", raising=False)
    monkeypatch.setenv("MINIVLLM_TRACE_DIR", str(tmp_path / "trace"))
    found = EngineArgs(device="cpu").create_engine_config().observability_config
    assert (found.trace_dir, found.trace_level) == (str(tmp_path / "trace"), "rpc")
    monkeypatch.setenv("MINIVLLM_TRACE", "off")
    found = EngineArgs(device="cpu").create_engine_config().observability_config
    assert (found.trace_dir, found.trace_level) == (None, "off")
