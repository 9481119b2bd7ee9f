"""Which model runner: every stage of the decision, in vLLM's order, and what the user is told of it."""

from __future__ import annotations

import ast
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import (
    BUNDLED_CHECKPOINT,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
    model_runner_decision,
)
from minivllm.config.model_runner_decision import (
    DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES,
    NEXT,
    NOT_ASKED,
    REFUSED,
    V1,
    V2,
    RunnerConfigError,
    decide_model_runner,
)
from minivllm.engine.arg_utils import EngineArgs
from minivllm.exceptions import ConfigError

VARIABLE = "MINIVLLM_USE_V2_MODEL_RUNNER"
VLLM = os.environ.get("MINIVLLM_VLLM_SOURCE")  # directory that holds the package `vllm` of 0.25.1
STAGES = ["environment", "v2_only", "default_model", "kernels", "unsupported_features", "validation"]


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model_runner_decision.warn_once.cache_clear()


def config_with(**model: Any) -> VllmConfig:
    """A configuration whose model is made out to be another kind, as no checkpoint of that kind is supported."""
    config = VllmConfig(ModelConfig())
    assert config.model_config is not None
    for name, value in model.items():
        setattr(config.model_config, name, value)
    return config


def answers(config: VllmConfig) -> list[str]:
    decision = decide_model_runner(config)
    assert [stage.name for stage in decision.stages] == STAGES
    assert all(
        stage.why and re.fullmatch(r"vllm/config/vllm\.py:[\d, -]+", stage.vllm) for stage in decision.stages
    )
    return [stage.answer for stage in decision.stages]


def test_a_dense_model_goes_through_all_stages_to_v2() -> None:
    config = VllmConfig(ModelConfig())
    assert answers(config) == [NEXT, NEXT, NEXT, NEXT, V2, V2]
    assert config.use_v2_model_runner
    assert config.model_runner_decision.decided_by.name == "unsupported_features"


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("model", [{}, {"runner_type": "pooling"}, {"is_moe": True}])
def test_the_environment_comes_first(
    value: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 1: nothing that follows changes what it says."""
    monkeypatch.setenv(VARIABLE, value)
    decision = decide_model_runner(config_with(**model))
    assert decision.use_v2 == (value == "1") and decision.decided_by.name == "environment"
    assert [stage.answer for stage in decision.stages[1:5]] == [NOT_ASKED] * 4
    assert decision.stages[5].answer == (V2 if value == "1" else V1)
    assert not decision.error and not decision.warning


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"runner_type": "pooling"}, "runner type 'pooling'"),
        ({"is_hybrid": True}, "hybrid"),
        ({"is_attention_free": True}, "no attention"),
        ({"is_moe": True}, "mixture of experts and not one of the 3"),
        ({"is_moe": True, "architecture": "MixtralForCausalLM"}, "MixtralForCausalLM"),
    ],
)
def test_models_that_do_not_run_on_v2_by_default(model: dict[str, Any], reason: str) -> None:
    """They get V1 without a warning: nothing is given up."""
    config = config_with(**model)
    assert answers(config) == [NEXT, NEXT, V1, NOT_ASKED, NOT_ASKED, V1]
    decision = decide_model_runner(config)
    assert reason in decision.decided_by.why and not decision.warning


@pytest.mark.parametrize("architecture", sorted(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES))
def test_mixtures_of_experts_on_the_list_run_on_v2(architecture: str) -> None:
    assert answers(config_with(is_moe=True, architecture=architecture)) == [NEXT, NEXT, NEXT, NEXT, V2, V2]


def test_the_list_does_not_help_against_the_other_conditions() -> None:
    config = config_with(is_moe=True, architecture="GraniteMoeForCausalLM", is_hybrid=True)
    assert answers(config)[2] == V1


def test_without_a_model_there_is_no_default_v2_model() -> None:
    assert answers(VllmConfig()) == [NEXT, NEXT, V1, NOT_ASKED, NOT_ASKED, V1]


def test_without_kernels_v1_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig(ModelConfig())
    monkeypatch.setattr(model_runner_decision, "_has_torch_kernels", lambda: False)
    assert answers(config) == [NEXT, NEXT, NEXT, V1, NOT_ASKED, V1]
    assert "needs torch" in decide_model_runner(config).warning
    monkeypatch.setenv(VARIABLE, "1")
    assert "needs torch" in decide_model_runner(config).error


UNSUPPORTED = [
    ({"logprobs_mode": "raw_logits"}, ["logprobs mode 'raw_logits'"]),
    ({"logits_processors": ["a:B"]}, ["custom logits processors"]),
    (
        {"logprobs_mode": "processed_logprobs", "logits_processors": ["a:B"]},
        ["custom logits processors", "logprobs mode 'processed_logprobs'"],
    ),
]


@pytest.mark.parametrize(("settings", "names"), UNSUPPORTED)
def test_an_unsupported_feature_falls_back_with_one_warning(
    settings: dict[str, Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 2, unforced: V1, and one line that names the feature, however often the configuration is made."""
    with caplog.at_level(logging.WARNING, logger="minivllm"):
        config = EngineArgs(device="cpu", **settings).create_engine_config()
        EngineArgs(device="cpu", **settings).create_engine_config()
    assert answers(config) == [NEXT, NEXT, NEXT, NEXT, V1, V1]
    assert not config.use_v2_model_runner
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in names)
    assert "using the V1 model runner instead" in record.getMessage()


@pytest.mark.parametrize(("settings", "names"), UNSUPPORTED)
def test_a_forced_v2_with_an_unsupported_feature_is_an_error(
    settings: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2, forced, and invariant 3: the variable wins over the chain, but not over the validation."""
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ConfigError, match="MINIVLLM_USE_V2_MODEL_RUNNER=1, but") as caught:
        EngineArgs(device="cpu", **settings).create_engine_config()
    assert all(name in str(caught.value) for name in names)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, RunnerConfigError) and str(error) == str(caught.value)
    assert error.decision.stages[-1].answer == REFUSED
    monkeypatch.setenv(VARIABLE, "0")
    assert not EngineArgs(device="cpu", **settings).create_engine_config().use_v2_model_runner


DRAFT_MODEL = {"model": str(BUNDLED_CHECKPOINT), "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize("speculative", [DRAFT_MODEL, NGRAM], ids=["draft", "ngram"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_both_runners_speculate(
    speculative: dict[str, Any], asynchronous: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is scheduled, and over however many stages; so that something V2 lacks leads to V1."""
    args = EngineArgs(
        device="cpu",
        speculative_config=speculative,
        async_scheduling=asynchronous,
        pipeline_parallel_size=stages,
    )
    assert answers(args.create_engine_config()) == [NEXT, NEXT, NEXT, NEXT, V2, V2]
    args.logprobs_mode = "raw_logits"
    assert answers(args.create_engine_config()) == [NEXT, NEXT, NEXT, NEXT, V1, V1]
    args.logprobs_mode = "raw_logprobs"
    for value in ("0", "1"):
        monkeypatch.setenv(VARIABLE, value)
        assert args.create_engine_config().use_v2_model_runner == (value == "1")


def test_a_method_that_only_v2_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's, which leads to V2 by the second stage; a forced V1 refuses it."""
    config = VllmConfig(ModelConfig(), speculative_config=SpeculativeConfig("dspark", 2))
    assert answers(config) == [NEXT, V2, NOT_ASKED, NOT_ASKED, NOT_ASKED, V2]
    with pytest.raises(ConfigError, match=r"only V2 has speculative method 'dspark', but .*'raw_logits'"):
        VllmConfig(ModelConfig(logprobs_mode="raw_logits"), speculative_config=SpeculativeConfig("dspark", 2))
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ConfigError, match="V1 model runner does not support speculative method 'dspark'"):
        VllmConfig(ModelConfig(), speculative_config=SpeculativeConfig("dspark", 2))


def test_what_neither_has_is_refused() -> None:
    """Sent to V1 for the processors, and refused there for the drafts."""
    with pytest.raises(
        ConfigError, match=r"V2 does not support custom logits processors, but the V1 .* together"
    ):
        EngineArgs(device="cpu", speculative_config=NGRAM, logits_processors=["a:B"]).create_engine_config()


def test_what_only_v2_has_is_asked_before_the_model_and_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the second stage, with a stand-in feature: V2 also for a model that is not V2's by default."""
    monkeypatch.setattr(model_runner_decision, "get_v2_only_features", lambda config: ["wings"])
    config = config_with(runner_type="pooling")
    assert answers(config) == [NEXT, V2, NOT_ASKED, NOT_ASKED, NOT_ASKED, V2]
    error = decide_model_runner(config_with(logprobs_mode="raw_logits")).error
    assert "only V2 has wings, but" in error and "raw_logits" in error
    monkeypatch.setenv(VARIABLE, "0")
    error = decide_model_runner(config).error
    assert "MINIVLLM_USE_V2_MODEL_RUNNER=0, but the V1 model runner does not support wings" in error


def test_all_ranks_get_the_same_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken once and travels with the configuration; a child's environment does not matter any more."""
    config = VllmConfig(ModelConfig())
    sent = pickle.dumps(config)
    monkeypatch.setenv(VARIABLE, "0")
    assert pickle.loads(sent).use_v2_model_runner
    assert pickle.loads(sent).model_runner_decision == config.model_runner_decision


@pytest.mark.parametrize(("pp", "v2", "expected"), [(1, "1", 2), (1, "0", 2), (2, "1", 3), (2, "0", 2)])
def test_batches_in_flight(pp: int, v2: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With V2 one more than there are stages; V1 overlaps either stages or steps."""
    from minivllm.config import ParallelConfig, SchedulerConfig

    monkeypatch.setenv(VARIABLE, v2)
    config = VllmConfig(
        ModelConfig(),
        parallel_config=ParallelConfig(pipeline_parallel_size=pp),
        scheduler_config=SchedulerConfig(async_scheduling=True),
    )
    assert config.max_concurrent_batches == expected


def doctor(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", "doctor", "--explain-runner", *args],
        env={**{k: v for k, v in os.environ.items() if k != VARIABLE}, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_doctor_prints_the_chain() -> None:
    done = doctor("--set", "logprobs_mode=raw_logits")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.strip() and not line.startswith(" ")][:6] == [
        *[NEXT] * 4,
        V1,
        V1,
    ]
    assert "logprobs mode 'raw_logits'" in done.stdout and "vllm/config/vllm.py:519-522" in done.stdout
    assert "gets Model Runner V1, decided by unsupported_features" in done.stdout
    assert done.stderr.count("using the V1 model runner instead") == 1


def test_doctor_as_json_and_with_a_refusal() -> None:
    done = doctor("--json", "--set", 'logits_processors=["a:B"]', MINIVLLM_USE_V2_MODEL_RUNNER="1")
    assert done.returncode == 2 and "custom logits processors" in done.stderr
    report = json.loads(done.stdout)
    assert report["runner"] is None and report["decided_by"] == "environment"
    assert [stage["name"] for stage in report["stages"]] == STAGES
    assert doctor("--set", "nonsense").returncode == 2
    assert "is not an engine argument" in doctor("--set", "nonsense=1").stderr


@pytest.mark.skipif(not VLLM, reason="MINIVLLM_VLLM_SOURCE does not name vLLM 0.25.1's source")
def test_lines_of_vllm_are_true() -> None:
    lines = (Path(str(VLLM)) / "vllm/config/vllm.py").read_text(encoding="utf-8").splitlines()
    proof = {
        "environment": "VLLM_USE_V2_MODEL_RUNNER",
        "v2_only": "is_diffusion",
        "default_model": "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES",
        "kernels": "HAS_TRITON",
        "unsupported_features": "custom logits processors",
        "validation": "_validate_v2_model_runner",
    }
    for stage in VllmConfig(ModelConfig()).model_runner_decision.stages:
        text = ""
        for part in stage.vllm.split(":")[1].split(", "):
            first, _, last = part.partition("-")
            text += "\n".join(lines[int(first) - 1 : int(last or first)])
        assert proof[stage.name] in text, stage.vllm
    tree = ast.parse("\n".join(lines))
    value = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
    )
    assert isinstance(value, ast.Call)
    assert ast.literal_eval(value.args[0]) == set(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)
