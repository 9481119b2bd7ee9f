"""What `minivllm doctor` finds about an engine: its shared memory, its checkpoint, its variables."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.cli import doctor_checks
from minivllm.cli.doctor_checks import Finding, Status
from minivllm.config.model import BUNDLED_CHECKPOINT
from minivllm.distributed.shm_segment import NotEnoughSharedMemory
from minivllm.distributed.shm_sizes import engine_bytes, engine_need, naming_the_whole_need
from minivllm.engine.arg_utils import EngineArgs
from minivllm.exceptions import ConfigError

Check = Callable[..., list[Finding]]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Check:
    """What doctor finds about an engine, without asking torch."""
    monkeypatch.setattr(doctor_checks, "_probe_torch", lambda: "not asked")

    def check(name: str, **asked: Any) -> list[Finding]:
        return [f for f in doctor_checks.all_checks(False, {"model": None, **asked}) if f.check == name]

    return check


def test_doctor_counts_every_segment_of_an_engine(checked: Check) -> None:
    """Rings of 10 MiB for the calls and for each rank's answers; per group two buffers of 1 MiB for each rank, or the
    channels of its stages."""
    for tp, pp, mib in ((1, 1, 0), (2, 1, 34), (1, 2, 34.5), (2, 2, 67)):
        config = EngineArgs(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu"
        ).create_engine_config()
        assert mib * 2**20 <= engine_bytes(config) <= (mib + 0.1) * 2**20
        (finding,) = checked("shared memory", tensor_parallel_size=tp, pipeline_parallel_size=pp)
        assert finding.found.endswith(engine_need(config)), finding
    with pytest.raises(ConfigError, match=r"are free \(TP=2 PP=2 needs 67\.1 MiB in all\); lower"):
        with naming_the_whole_need(config):
            raise NotEnoughSharedMemory("1 byte is needed, 0 are free", "lower it")


def test_doctor_finds_a_shared_memory_that_is_a_page_too_small(
    checked: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = engine_bytes(EngineArgs(tensor_parallel_size=2, device="cpu").create_engine_config())
    for free, status in ((need - 4096, Status.MISSING), (need, Status.FINE)):
        pages = os.statvfs_result((4096, 4096, 1 << 20, free // 4096, free // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path, pages=pages: pages)
        (finding,) = checked("shared memory")
        assert finding.status is status


def test_doctor_checks_the_checkpoint_that_it_is_given(checked: Check, tmp_path: Path) -> None:
    (finding,) = checked("checkpoint")
    assert "bundled" in finding.found
    mine = tmp_path / "mine"
    shutil.copytree(BUNDLED_CHECKPOINT, mine)
    (finding,) = checked("checkpoint", model=str(mine))
    assert finding.status is Status.FINE and str(mine) in finding.found
    (mine / "tokenizer.json").unlink()
    (finding,) = checked("checkpoint", model=str(mine))
    assert finding.status is Status.NOTE and "no tokenizer.json" in finding.found
    for file in mine.glob("*.safetensors"):
        file.unlink()
    (finding,) = checked("checkpoint", model=str(mine))
    assert finding.status is Status.MISSING and "has no weights" in finding.found
    (finding,) = checked("checkpoint", model=str(tmp_path / "nowhere"))
    assert finding.status is Status.MISSING and "nowhere" in finding.found
    (finding,) = checked("shared memory", model=str(tmp_path / "nowhere"))
    assert finding.status is Status.FINE


def test_doctor_does_not_contradict_itself_about_variables(
    checked: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MINIVLLM_")]:
        monkeypatch.delenv(name)
    assert [f.found for f in checked("environment")] == ["no MINIVLLM_* variable is set (--env lists them)"]
    monkeypatch.setenv("MINIVLLM_NOSUCH", "1")
    assert [f.found for f in checked("environment")] == ["MINIVLLM_NOSUCH is unknown and has no effect"]
    monkeypatch.setenv("MINIVLLM_MQ_SPIN_US", "20")
    assert [f.found for f in checked("environment")] == [
        "MINIVLLM_MQ_SPIN_US=20",
        "MINIVLLM_NOSUCH is unknown and has no effect",
    ]
