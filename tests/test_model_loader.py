"""Loading: shards of files and of tensors, and errors that name the tensor and its file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import Driver, SpawnedWorkers, local_worker, make_config
from safetensors.torch import load_file, save_file

from minivllm.assets.make_checkpoint import PRESETS, make_random_checkpoint
from minivllm.exceptions import ConfigError
from minivllm.executor.uniproc_executor import UniProcExecutor
from minivllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [[5, 17, 900, 3], [1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("m") / "whole", **PRESETS["qwen3-gqa2"], seed=6)


def tokens(path: Path, **kwargs: Any) -> list[list[int]]:
    with local_worker(str(path), **kwargs) as worker:
        return [r.output for r in Driver(worker).generate(PROMPTS, GREEDY)]


def changed(checkpoint: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the checkpoint with other tensors."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def test_files_with_an_index(checkpoint: Path, tmp_path: Path) -> None:
    """Several files give the same model as one, and so does a directory of files without an index."""
    expected = tokens(checkpoint)
    sharded = make_random_checkpoint(tmp_path / "s", **PRESETS["qwen3-gqa2"], seed=6, shards=3)
    assert tokens(sharded) == expected
    (sharded / "model.safetensors.index.json").unlink()
    assert tokens(sharded) == expected


def test_leftovers_of_old_releases_are_ignored(checkpoint: Path, tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert tokens(changed(checkpoint, tmp_path / "c", change)) == tokens(checkpoint)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def replace(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({name: torch.zeros(shape)})


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(K_PROJ), rf"tensor '{K_PROJ}' is missing in the checkpoint .*model.safetensors"),
        (drop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
        (
            replace(K_PROJ, (64, 32)),
            rf"tensor '{K_PROJ}' in .*model.safetensors has shape \[64, 32\], but config.json asks for \[64, 64\]",
        ),
        (replace("model.embed_tokens.weight", (100, 64)), r"has shape \[100, 64\]"),
        (replace("model.layers.0.mlp.down_proj.weight", (64, 95)), r"has shape \[64, 95\]"),
        (replace("model.layers.2.self_attn.q_norm.weight", (8,)), r"has shape \[8\]"),
        (
            replace("model.layers.3.mlp.up_proj.weight", (2, 2)),
            "1 tensors of the checkpoint have no place in Qwen3ForCausalLM, among them 'model.layers.3.mlp.up_proj",
        ),
    ],
)
def test_wrong_tensors(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = changed(checkpoint, tmp_path / "c", change)
    with pytest.raises(ConfigError, match=message):
        tokens(path)


def test_unreadable_files(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(checkpoint, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read as safetensors"):
        tokens(path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"has no \*.safetensors file"):
        tokens(path)
    index = path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json lacks weight_map"):
        tokens(path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": 5}}))
    with pytest.raises(ConfigError, match=r"index\.json: weight_map\['model\.norm\.weight'\]=5 is not valid"):
        tokens(path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone.safetensors does not exist"):
        tokens(path)
    shutil.copy(checkpoint / "model.safetensors", path / "gone.safetensors")
    index.write_text(json.dumps({"weight_map": {"nobody": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"tensor 'nobody' is not in .*gone.safetensors"):
        tokens(path)


def bytes_read(rank: int, worker: Any) -> tuple[int, int, int]:
    """Bytes read, bytes of the tensors as a whole, and bytes of this rank's parameters."""
    from minivllm.model_executor.model_loader.default_loader import DefaultModelLoader

    runner = worker.model_runner
    statistics, _, _ = DefaultModelLoader().load_weights(runner.model, runner.model_config)
    return statistics.bytes_read, statistics.bytes_whole, sum(p.nbytes for p in runner.model.parameters())


@pytest.mark.timeout(120)
def test_a_rank_reads_its_shard_only(checkpoint: Path) -> None:
    workers = SpawnedWorkers(2)
    try:
        workers.bring_up(make_config(str(checkpoint), tp=2))
        for read, whole, held in workers.call(bytes_read):
            assert read < 0.52 * whole
            # All that is held but not read is the embedding's row of zeros.
            assert held - read == 64 * 4
        workers.shut_down_workers()
    finally:
        workers.close()


def test_a_process_has_room_for_one_model(checkpoint: Path) -> None:
    """The second is refused with what to do, and leaves the groups of the first alone."""
    config = make_config(str(checkpoint))
    with local_worker(str(checkpoint)) as worker:
        before = [r.output for r in Driver(worker).generate(PROMPTS, GREEDY)]
        with pytest.raises(
            ConfigError, match=r"runs a model already .*shutdown\(\) .*MINIVLLM_ENABLE_MULTIPROCESSING"
        ):
            UniProcExecutor(config)
        assert [r.output for r in Driver(worker).generate(PROMPTS, GREEDY)] == before
    UniProcExecutor(config).shutdown()
