"""Read-your-shard: two ranks that read a real safetensors file and add up what they compute.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from minivllm.learn import kit

RANKS = 2
HIDDEN = 12
NEURONS = 16
Array = NDArray[np.float32]


class CountingFile:
    """An open safetensors file that counts the elements that are read from it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.read = 0

    def get_tensor(self, name: str) -> Array:
        return self.count(self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self, self._file.get_slice(name))

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def count(self, array: Array) -> Array:
        self.read += array.size
        return array


class CountingSlice:
    def __init__(self, file: CountingFile, piece: Any) -> None:
        self._file, self._piece = file, piece

    def get_shape(self) -> list[int]:
        return list(self._piece.get_shape())

    def __getitem__(self, index: Any) -> Array:
        return self._file.count(self._piece[index])


def check_shapes(module: Any) -> None:
    """A rank keeps 2 · I / W rows of gate_up and I / W columns of down."""
    for rank, said in enumerate(_run(module)):
        expected = [(2 * NEURONS // RANKS, HIDDEN), (HIDDEN, NEURONS // RANKS)]
        if said["shapes"] != expected:
            raise kit.Broken(f"rank {rank} keeps gate_up and down as {said['shapes']} instead of {expected}")


def check_same_neurons(module: Any) -> None:
    """The gate rows, the up rows and the down columns of a rank belong to the same neurons."""
    for rank, said in enumerate(_run(module)):
        first, second, columns = said["kept"]
        numbers = [[number for _, number in part] for part in said["kept"]]
        kinds = [{matrix for matrix, _ in part} for part in (first, second, columns)]
        if kinds != [{"gate"}, {"up"}, {"down"}] or numbers[0] != numbers[1] or numbers[0] != numbers[2]:
            raise kit.Broken(
                f"the first half of rank {rank}'s gate_up is {_span(first)}, the second half is {_span(second)}, "
                f"and its down is {_span(columns)}"
            )


def check_sum(module: Any) -> None:
    """The parts of all ranks add up to what one rank with all weights computes."""
    results = _run(module)
    got = sum(said["part"] for said in results)
    expected = _mlp(*_weights(), _token())
    if not np.allclose(got, expected, rtol=1e-4, atol=1e-5):
        raise kit.Broken(f"the sum differs from the whole by {np.abs(got - expected).max():.3g}")


def check_reads_its_share(module: Any) -> None:
    """A rank reads from the file only what it keeps."""
    for rank, said in enumerate(_run(module)):
        share = 3 * NEURONS * HIDDEN // RANKS
        if said["read"] > share:
            raise kit.Broken(f"rank {rank} keeps {share} elements, and has read {said['read']}")


def _weights() -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    return (
        random.standard_normal((2 * NEURONS, HIDDEN), dtype=np.float32),
        random.standard_normal((HIDDEN, NEURONS), dtype=np.float32),
    )


def _token() -> Array:
    return np.random.default_rng(1).standard_normal(HIDDEN, dtype=np.float32)


def _mlp(gate_up: Array, down: Array, x: Array) -> Array:
    gate, up = np.split(gate_up @ x, 2)
    activated: Array = gate / (1 + np.exp(-gate)) * up
    return down @ activated


def _span(kept: list[tuple[str, int]]) -> str:
    """Such as `gate 0 to 7, up 0 to 3`."""
    parts: list[list[tuple[str, int]]] = []
    for matrix, number in kept:
        if parts and parts[-1][-1] == (matrix, number - 1):
            parts[-1].append((matrix, number))
        else:
            parts.append([(matrix, number)])
    return ", ".join(f"{part[0][0]} {part[0][1]} to {part[-1][1]}" for part in parts)


@functools.cache
def _run(module: Any) -> list[dict[str, Any]]:
    """What each rank says about its shard."""
    with _checkpoint() as path:
        pipes = [kit.context.Pipe(duplex=False) for _ in range(RANKS)]
        workers = [kit.start(_worker, module.load_shard, path, rank, pipes[rank][1]) for rank in range(RANKS)]
        try:
            results = []
            for rank, (ours, theirs) in enumerate(pipes):
                theirs.close()
                if not ours.poll(10 * kit.slack()):
                    kit.must_end(workers[rank], 0.1, f"rank {rank}")
                said = ours.recv()
                if isinstance(said, str):
                    raise kit.Broken(f"rank {rank}: {said}")
                results.append(said)
            return results
        finally:
            kit.end(*workers)


@contextmanager
def _checkpoint() -> Iterator[str]:
    gate_up, down = _weights()
    with tempfile.TemporaryDirectory(prefix="minivllm-learn-") as folder:
        path = str(Path(folder) / "model.safetensors")
        save_file({"gate_up": gate_up, "down": down}, path)
        yield path


def _worker(load_shard: Any, path: str, rank: int, result: Connection) -> None:
    try:
        with safe_open(path, framework="numpy") as opened:
            file = CountingFile(opened)
            gate_up, down = (np.asarray(part) for part in load_shard(file, rank, RANKS))
        said: dict[str, Any] = {"shapes": [gate_up.shape, down.shape], "read": file.read}
        if said["shapes"] == [(2 * NEURONS // RANKS, HIDDEN), (HIDDEN, NEURONS // RANKS)]:
            said["part"] = _mlp(gate_up, down, _token())
            said["kept"] = _kept(gate_up, down)
        result.send(said)
    except Exception as error:
        result.send(f"{type(error).__name__}: {error}")


def _kept(gate_up: Array, down: Array) -> list[list[tuple[str, int]]]:
    """Matrix and neuron of each row in either half of gate_up, and of each column of down."""
    whole_gate_up, whole_down = _weights()
    rows = [_index(whole_gate_up, row) for row in gate_up]
    named = [("gate", row) if row < NEURONS else ("up", row - NEURONS) for row in rows]
    half = len(named) // 2
    return [named[:half], named[half:], [("down", _index(whole_down.T, column)) for column in down.T]]


def _index(whole: Array, part: Array) -> int:
    found = np.flatnonzero((whole == part).all(axis=1))
    return int(found[0]) if len(found) else -1
