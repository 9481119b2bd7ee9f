"""Which model runner an engine gets: a chain of questions, with the answer at each stage kept as data.

vLLM 0.25.1: vllm/config/vllm.py (VllmConfig.use_v2_model_runner, _is_default_v2_model_runner_model,
_get_v2_model_runner_unsupported_features, _validate_v2_model_runner)
Articles: part 1 §6
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from minivllm import envs
from minivllm.exceptions import ConfigError

if TYPE_CHECKING:
    from minivllm.config.model import ModelConfig
    from minivllm.config.vllm import VllmConfig

logger = logging.getLogger(__name__)

# Mixtures of experts that run on V2 by default. minivllm has no such model; the rule is vLLM's all the same.
DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES: Final = frozenset(
    {"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"}
)

# Likewise: a way to speculate that minivllm does not have.
V2_ONLY_METHODS: Final = frozenset({"dspark"})

V1: Final = "V1"
V2: Final = "V2"
NEXT: Final = "next question"
NOT_ASKED: Final = "not asked"
REFUSED: Final = "refused"
_FILE = "vllm/config/vllm.py"


class Stage(NamedTuple):
    """One question.

    Attributes:
        name: "environment", "v2_only", "default_model", "kernels", "unsupported_features" or "validation".
        answer: V1, V2, NEXT, NOT_ASKED or REFUSED.
        why: what the answer rests on, in words.
        vllm: where vLLM 0.25.1 asks it, file:line.
    """

    name: str
    answer: str
    why: str
    vllm: str


@dataclass(frozen=True, slots=True)
class RunnerDecision:
    """The outcome.

    Attributes:
        stages: every question in order, also those that were not asked any more.
        error: why the configuration is refused; "" when it is not.
        warning: what was given up on the way to V1; "" when nothing was.
    """

    use_v2: bool
    stages: tuple[Stage, ...]
    error: str = ""
    warning: str = ""

    @property
    def decided_by(self) -> Stage:
        """The stage whose answer was the last word."""
        return next(stage for stage in self.stages if stage.answer in (V1, V2))


class RunnerConfigError(ConfigError):
    """The runner that the environment forces cannot do what the configuration asks.

    Attributes:
        decision: the chain that led here.
    """

    def __init__(self, decision: RunnerDecision) -> None:
        super().__init__(decision.error)
        self.decision = decision

    def __reduce__(self) -> tuple[type[RunnerConfigError], tuple[RunnerDecision]]:
        # The default would call __init__ with the text.
        return type(self), (self.decision,)


def decide_model_runner(config: VllmConfig) -> RunnerDecision:
    """Ask the questions in vLLM's order; the first answer that names a runner holds.

    Invariants:
        1. The environment comes first: nothing that follows can change what it says, only refuse it.
        2. What V2 cannot do sends the engine to V1 only when nobody insisted on V2.
        3. Whoever is chosen, by whatever stage, passes the validation at the end.
    """
    stages: list[Stage] = []
    chosen = ""
    for name, question, line in (
        ("environment", _environment, "519-522"),
        ("v2_only", _v2_only, "524-535"),
        ("default_model", _default_model, "537-538, 557-574"),
        ("kernels", _kernels, "540-544"),
        ("unsupported_features", _unsupported_features, "546-555, 2042-2135"),
    ):
        answer, why = (NOT_ASKED, f"{chosen} was decided before") if chosen else question(config)
        stages.append(Stage(name, answer, why, f"{_FILE}:{line}"))
        if answer in (V1, V2):
            chosen = answer
    decisive = next(stage for stage in stages if stage.answer == chosen)
    warning = ""
    if decisive.name in ("kernels", "unsupported_features") and chosen == V1:
        warning = f"{decisive.why}; using the V1 model runner instead"
    stage, error = _validation(config, chosen, decisive)
    return RunnerDecision(chosen == V2, (*stages, stage), error, warning)


def _environment(config: VllmConfig) -> tuple[str, str]:
    forced: bool | None = envs.MINIVLLM_USE_V2_MODEL_RUNNER
    if forced is None:
        return NEXT, "MINIVLLM_USE_V2_MODEL_RUNNER is not set"
    return V2 if forced else V1, f"MINIVLLM_USE_V2_MODEL_RUNNER={int(forced)}"


def _v2_only(config: VllmConfig) -> tuple[str, str]:
    features = get_v2_only_features(config)
    if features:
        return V2, f"only V2 has {', '.join(features)}"
    return NEXT, "nothing in use that only V2 has"


def _default_model(config: VllmConfig) -> tuple[str, str]:
    model_config = config.model_config
    if model_config is None:
        return V1, "the configuration has no model"
    reason = why_no_default_v2_model(model_config)
    if reason is not None:
        return V1, reason
    kind = "mixture of experts on the list" if model_config.is_moe else "dense"
    return NEXT, f"{model_config.architecture}: generates text, full attention, {kind}"


def _kernels(config: VllmConfig) -> tuple[str, str]:
    """vLLM's V2 prepares inputs and samples in Triton kernels, and is not to be had without. Here, torch's own
    operations do that on every device, so that this asks for torch alone."""
    if _has_torch_kernels():
        return NEXT, "torch is installed; its own operations are all the kernels that V2 needs here"
    return V1, "Model Runner V2 needs torch, which is not installed"


def _unsupported_features(config: VllmConfig) -> tuple[str, str]:
    unsupported = get_v2_unsupported_features(config)
    if unsupported:
        return V1, f"Model Runner V2 does not support {', '.join(unsupported)}"
    return V2, "no feature in use that V2 lacks"


def _validation(config: VllmConfig, chosen: str, decisive: Stage) -> tuple[Stage, str]:
    """The last stage, and the error when it refuses.

    Deviation from vLLM: there, V1 is not checked, and what it lacks fails later or is silently left out.
    """
    line = f"{_FILE}:1386, 2137-2146"
    lacks, other_lacks = get_v1_unsupported_features(config), get_v2_unsupported_features(config)
    name, other = "the V1 model runner", V2
    if chosen == V2:
        name, other, lacks, other_lacks = "Model Runner V2", V1, other_lacks, lacks
    if lacks:
        why = f"{name} does not support {', '.join(lacks)}"
    elif chosen == V2 and not _has_torch_kernels():
        why = f"{name} needs torch, which is not installed"
    else:
        return Stage("validation", chosen, f"{chosen} can do everything that is asked for", line), ""
    remedy = "leave one of them out"
    if decisive.name == "environment" and not other_lacks:
        remedy = f"unset the variable, and {other} is chosen, or leave the feature out"
    return Stage("validation", REFUSED, why, line), f"{decisive.why}, but {why}; {remedy}"


def why_no_default_v2_model(model_config: ModelConfig) -> str | None:
    """Why a model does not run on V2 by default; None when it does."""
    if model_config.runner_type != "generate":
        return f"runner type {model_config.runner_type!r}: V2 is the default for 'generate' only"
    if model_config.is_hybrid:
        return "the model is hybrid (attention and state space layers)"
    if model_config.is_attention_free:
        return "the model has no attention"
    if model_config.is_moe and model_config.architecture not in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES:
        return f"{model_config.architecture} is a mixture of experts and not one of the {len(DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES)} on V2's list"
    return None


def get_v2_only_features(config: VllmConfig) -> list[str]:
    """Features in use that only V2 has. In vLLM: speculative method "dspark", and diffusion models. Neither exists here, so
    that this stage never decides; it is the place where such a feature would.
    """
    speculative_config = config.speculative_config
    if speculative_config is not None and speculative_config.method in V2_ONLY_METHODS:
        return [f"speculative method {speculative_config.method!r}"]
    return []


def get_v1_unsupported_features(config: VllmConfig) -> list[str]:
    """Features in use that V1 lacks: those that only V2 has, and combinations that neither has."""
    unsupported = get_v2_only_features(config)
    if (
        config.speculative_config is not None
        and config.model_config is not None
        and config.model_config.logits_processors
    ):
        # A row has several lines of logits then, and a processor knows of one.
        unsupported.append("custom logits processors together with speculative decoding")
    return unsupported


def get_v2_unsupported_features(config: VllmConfig) -> list[str]:
    """Features in use that V2 lacks, of those that minivllm has at all; vLLM's list has sixteen entries.

    Deviation from vLLM: n-grams and draft models are on that list there, as only V1 has them. Here both runners have both.
    V2 there has the log-probabilities mode processed_logprobs, and here it has not.
    """
    unsupported: list[str] = []
    model_config = config.model_config
    if model_config is not None and model_config.logits_processors:
        unsupported.append("custom logits processors")
    if model_config is not None and model_config.logprobs_mode != "raw_logprobs":
        unsupported.append(f"logprobs mode {model_config.logprobs_mode!r}")
    return unsupported


@functools.cache
def _has_torch_kernels() -> bool:
    # Finds the package without importing it, which a client never does.
    return importlib.util.find_spec("torch") is not None


@functools.cache
def warn_once(message: str) -> None:
    """A front end may make one configuration twice, to check it first; the reader is to be told once."""
    logger.warning(message)
