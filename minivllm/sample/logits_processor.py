"""Logits processors of the user's own, and how the V1 runner tells them which row is whose.

vLLM 0.25.1: vllm/v1/sample/logits_processor/interface.py (LogitsProcessor, BatchUpdate), state.py
(BatchUpdateBuilder), __init__.py (build_logitsprocs)
Articles: part 1 §6, §7

A processor keeps state per row of the persistent batch, and rows move. So each step it is told of all moves, and one
that misses a move changes another request's logits. This interface is the persistent batch turned outwards, which is
why Model Runner V2, where nothing moves, does not have it.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.exceptions import ConfigError
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from minivllm.config import VllmConfig


class MoveDirectionality(Enum):
    """Whether the first row took the second one's place, or both changed places."""

    UNIDIRECTIONAL = 0
    SWAP = 1


class AddedRequest(NamedTuple):
    """A request that got a row.

    Attributes:
        output_token_ids: the request's own list: it grows with each token.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class MovedRequest(NamedTuple):
    """One row that went to another, or two that changed places."""

    source: int
    target: int
    directionality: MoveDirectionality


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What happened to the rows, to be followed in this order: removed, added, moved.

    Attributes:
        batch_size: rows in use afterwards.
        removed: rows that are empty now; one that was given to a new request at once is among the added only.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes logits before a token is chosen. Written for vLLM's V1 runner, a class works here, too."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, `[num_reqs, vocab_size]`, changed in place or replaced."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the most likely; then greedy batches do without it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each step; None when no row has changed hands."""


class BatchUpdateBuilder:
    """Collects what happens to the rows in one step, and says which empty row is to be filled next.

    Attributes:
        removed: empty rows, the highest first, so that the lowest is popped.
    """

    def __init__(self) -> None:
        self.removed: list[int] = []
        self.added: list[AddedRequest] = []
        self.moved: list[MovedRequest] = []

    def removed_append(self, index: int) -> None:
        self.removed.append(index)
        self.removed.sort(reverse=True)

    def pop_removed(self) -> int | None:
        """Take the lowest empty row."""
        return self.removed.pop() if self.removed else None

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """What was collected; None when nothing was."""
        if not (self.removed or self.added or self.moved):
            return None
        update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self.removed, self.added, self.moved = [], [], []
        return update


def build_logitsprocs(vllm_config: VllmConfig, device: torch.device) -> list[LogitsProcessor]:
    """The configured processors, in their order.

    Raises:
        ConfigError: one cannot be imported, or is no LogitsProcessor; or drafts are to be verified, for which a row has
            several lines of logits.
    """
    assert vllm_config.model_config is not None
    if vllm_config.model_config.logits_processors and vllm_config.speculative_config is not None:
        raise ConfigError(
            "custom logits processors do not work with speculative_config; leave one of them out"
        )
    is_pin_memory = device.type == "cuda"
    return [
        _load(name)(vllm_config, device, is_pin_memory)
        for name in vllm_config.model_config.logits_processors or ()
    ]


def _load(name: str | type) -> type[LogitsProcessor]:
    found: Any = name
    if isinstance(name, str):
        module, _, qualname = name.partition(":")
        try:
            found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(
                f"logits processor {name!r} cannot be imported ({e}); use 'module:Class'"
            ) from e
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits processor {name!r} is no subclass of minivllm's LogitsProcessor")
    return found
