"""Speculative decoding: who proposes tokens, and how many.

vLLM 0.25.1: vllm/config/speculative.py (SpeculativeConfig)
Articles: part 2 §2.3.6
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.config.checks import INT_MAX, is_integer
from minivllm.config.model import ModelConfig
from minivllm.exceptions import ConfigError

if TYPE_CHECKING:
    from minivllm.config.vllm import VllmConfig

_METHODS = ("ngram", "draft_model")
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(slots=True)
class SpeculativeConfig:
    """Attributes:
    method: "ngram" looks for the last tokens further up in the text, "draft_model" asks a smaller model.
    num_speculative_tokens: proposed per step and request, at most.
    prompt_lookup_max, prompt_lookup_min: how many of the last tokens must occur again (n-gram only).
    draft_model_config: the smaller model (draft model only); it has the target's vocabulary, dtype and length.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0
    draft_model_config: ModelConfig | None = None

    @classmethod
    def from_dict(cls, given: Any, target: ModelConfig) -> SpeculativeConfig:
        """What the user passes as `speculative_config`, checked against the target model. Raises ConfigError."""
        if not isinstance(given, dict):
            raise ConfigError(f"speculative_config={given!r} is not valid: a dict with {', '.join(_KEYS)}")
        for key in given:
            if key not in _KEYS:
                raise ConfigError(f"speculative_config: {key!r} is not known; known are {', '.join(_KEYS)}")
        model = given.get("model")
        method = given.get("method") or ("draft_model" if model is not None else None)
        if method not in _METHODS:
            raise ConfigError(
                f"speculative_config: method={method!r} is not supported; use {' or '.join(map(repr, _METHODS))}"
            )
        count: Any = given.get("num_speculative_tokens")
        if not _positive(count):
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={count!r} is not valid: an integer of at least 1 is needed"
            )
        if method == "ngram":
            if model is not None:
                raise ConfigError("speculative_config: method='ngram' takes no model; leave one of them out")
            most, least = _prompt_lookup(given)
            return cls(method, count, most, least)
        for key in ("prompt_lookup_max", "prompt_lookup_min"):
            if given.get(key) is not None:
                raise ConfigError(f"speculative_config: {key} is for method='ngram' only; leave it out")
        if model is None:
            raise ConfigError("speculative_config: method='draft_model' needs model, a checkpoint directory")
        draft = ModelConfig(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            dtype=target.dtype,
            max_model_len=target.max_model_len,
            seed=target.seed,
            device=target.device,
            enforce_eager=target.enforce_eager,
        )
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculative_config: the draft model has a vocabulary of {draft.vocab_size} tokens, the target model "
                f"one of {target.vocab_size}; they must be the same"
            )
        return cls(method, count, draft_model_config=draft)

    def make_draft_vllm_config(self, target: VllmConfig) -> VllmConfig:
        """What the draft model is loaded by: the target's configuration, with one pipeline stage."""
        return dataclasses.replace(
            target,
            model_config=self.draft_model_config,
            parallel_config=dataclasses.replace(target.parallel_config, pipeline_parallel_size=1),
            speculative_config=None,
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions beyond those of a step for which KV cache must be there: a draft model writes as it proposes."""
        return self.num_speculative_tokens if self.method == "draft_model" else 0


def _positive(value: Any) -> bool:
    return is_integer(value) and 1 <= value <= INT_MAX


def _prompt_lookup(given: dict[str, Any]) -> tuple[int, int]:
    """Largest and smallest n; one that is missing is taken to be the other, and 5 when both are."""
    most: Any = given.get("prompt_lookup_max")
    least: Any = given.get("prompt_lookup_min")
    if most is None and least is None:
        most = least = 5
    most = least if most is None else most
    least = most if least is None else least
    if not (_positive(most) and _positive(least) and least <= most):
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={least!r} and prompt_lookup_max={most!r} are not valid: integers "
            "of at least 1, the first not above the second"
        )
    return most, least
