"""Tensors in safetensors files, of which a rank reads only its own part.

vLLM 0.25.1: vllm/model_executor/model_loader/weight_utils.py (safetensors_weights_iterator)
Articles: part 1 §8.2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.config.json_file import JsonFile
from minivllm.exceptions import ConfigError


@dataclass(slots=True)
class ReadStatistics:
    """What one rank has read: tensors touched, bytes taken out of them, and bytes that they have as a whole."""

    num_tensors: int = 0
    bytes_read: int = 0
    bytes_whole: int = 0


class WeightSlice:
    """One tensor of a checkpoint, not read yet."""

    def __init__(self, name: str, file: Path, source: Any, statistics: ReadStatistics) -> None:
        self.name = name
        self.file = file
        self.shape: tuple[int, ...] = tuple(source.get_shape())
        self._source = source
        self._statistics = statistics

    def expect_shape(self, shape: tuple[int, ...]) -> None:
        """Raises ConfigError, naming tensor and file, when the whole tensor has another shape."""
        if self.shape != shape:
            raise ConfigError(
                f"tensor {self.name!r} in {self.file} has shape {list(self.shape)}, but config.json asks for "
                f"{list(shape)}"
            )

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """Read `length` entries along dimension 0 or 1 from `start` on (None: to the end); nothing else is read."""
        stop = self.shape[dim] if length is None else start + length
        part: Tensor = self._source[start:stop] if dim == 0 else self._source[:, start:stop]
        whole = part.element_size()
        for size in self.shape:
            whole *= size
        self._statistics.num_tensors += 1
        self._statistics.bytes_read += part.nbytes
        self._statistics.bytes_whole += whole
        return part


class SafetensorsCheckpoint:
    """The weights of a directory: one model.safetensors, or several files with an index.

    Attributes:
        file_of: tensor name -> file.
        statistics: what has been read so far.

    Raises:
        ConfigError: there are no weights, a file cannot be read, or the index names a file that is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.statistics = ReadStatistics()
        self.file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._from_index(index)
        else:
            files = sorted(directory.glob("*.safetensors"))
            if not files:
                raise ConfigError(
                    f"{directory} has no *.safetensors file; other weight formats are not supported"
                )
            for file in files:
                self.file_of.update(dict.fromkeys(self._file(file).keys(), file))

    def _from_index(self, index: Path) -> None:
        weight_map = JsonFile(index).table("weight_map")
        if not weight_map:
            raise ConfigError(f"{index} lacks weight_map, which names the file of each tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ConfigError(
                    f"{index}: weight_map[{name!r}]={file!r} is not valid: the name of a file is needed"
                )
        self.file_of = {name: self.directory / file for name, file in weight_map.items()}
        for file in sorted(set(self.file_of.values())):
            held = set(self._file(file).keys())
            for name, where in self.file_of.items():
                if where == file and name not in held:
                    raise ConfigError(f"tensor {name!r} is not in {file}, where {index.name} says it is")

    @property
    def num_files(self) -> int:
        return len(self._open)

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise ConfigError(
                    f"{file} does not exist, but the index of the checkpoint names it"
                ) from None
            except (OSError, SafetensorError) as e:
                raise ConfigError(f"{file} cannot be read as safetensors: {e}") from None
        return self._open[file]

    def get(self, name: str) -> WeightSlice:
        """The tensor of that name. Raises ConfigError when it is in no file."""
        file = self.file_of.get(name)
        if file is None:
            raise ConfigError(
                f"tensor {name!r} is missing in the checkpoint {self.directory} "
                f"({', '.join(sorted({f.name for f in self.file_of.values()}))})"
            )
        return WeightSlice(name, file, self._file(file).get_slice(name), self.statistics)

    def close(self) -> None:
        """Unmap all files."""
        self._open.clear()
