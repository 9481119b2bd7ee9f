"""MINIVLLM_* variables: a wrong value is refused in one line before anything is started."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from minivllm import LLM, envs
from minivllm.exceptions import ConfigError

# Any text is a directory; the others are set by processes of ours for their children. Failpoints have their own tests.
FREE = {
    "MINIVLLM_TRACE_DIR",
    "MINIVLLM_TRACE_ANCHOR",
    "MINIVLLM_TRACE_START",
    "MINIVLLM_LIVE_STEP",
    "MINIVLLM_FAILPOINTS",
}
CHECKED = sorted(envs.environment_variables.keys() - FREE)


@pytest.mark.parametrize("name", CHECKED)
def test_a_wrong_value_is_refused_before_anything_is_started(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ("bogus", "-1", "nan", "inf", "1e9", "0x10")
    for text in wrong:
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"^{name}='{text}' is not valid: .* is needed$") as caught:
            LLM()
        assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_defaults_and_limits_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in envs.environment_variables.items():
        monkeypatch.setenv(name, variable.default)
    for name, text in {
        "MINIVLLM_WORKER_SHUTDOWN_TIMEOUT_S": "0",
        "MINIVLLM_MQ_SPIN_US": "0",
        "MINIVLLM_STARTUP_TIMEOUT_S": "1e-3",
        "MINIVLLM_LOG_LEVEL": "debug",
        "MINIVLLM_TRACE": "",
    }.items():
        monkeypatch.setenv(name, text)
    envs.check_all()
    assert envs.MINIVLLM_LOG_LEVEL == "DEBUG" and envs.MINIVLLM_TRACE == "off"
    assert envs.MINIVLLM_MAX_CONCURRENT_BATCHES is None and envs.MINIVLLM_USE_V2_MODEL_RUNNER is None


def test_the_command_says_it_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", "generate", "a"],
        env={**os.environ, "MINIVLLM_LOG_LEVEL": "bogus"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    allowed = "one of DEBUG, INFO, WARNING, ERROR, CRITICAL is needed"
    assert done.stderr == f"minivllm: error: MINIVLLM_LOG_LEVEL='bogus' is not valid: {allowed}\n"
    assert done.returncode == 2 and not done.stdout
