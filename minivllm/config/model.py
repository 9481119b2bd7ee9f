"""The model: which checkpoint, its shape, its dtype and length.

vLLM 0.25.1: vllm/config/model.py (ModelConfig)
Articles: part 1 §6

Reads config.json only; neither torch nor the weights are touched, so that bad input is refused in the
caller within milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.config.checks import check_flags, is_integer, is_number
from minivllm.config.json_file import JsonFile
from minivllm.exceptions import ConfigError

BUNDLED_CHECKPOINT = Path(__file__).resolve().parent.parent / "assets" / "tiny-qwen3"
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")
_DTYPES = ("float32", "bfloat16", "float16")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class ModelConfig:
    """A local Hugging Face directory, understood.

    Attributes:
        model: the directory (None: the bundled checkpoint).
        dtype: "auto", "float32", "bfloat16" or "float16"; resolved to one of the last three.
        max_model_len: prompt plus output, in tokens (None: what the checkpoint allows).
        seed: seed of everything random on a rank that no request seeds itself.
        device: "cpu" or "cuda"; resolved before this object is made.
        logits_processors: classes (or "module:Class") that change logits before a token is chosen; V1 only.
        logprobs_mode: what log-probabilities report: "raw_logprobs" as the model gave them, "processed_logprobs" after
            all that sampling does to them, "raw_logits" and "processed_logits" without the logarithm; all but the
            first are V1 only.
    """

    model: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    device: str = "cpu"
    enforce_eager: bool = False
    logits_processors: list[str | type] | None = None
    logprobs_mode: str = "raw_logprobs"
    hf_config: dict[str, Any] = field(default_factory=dict)

    # Filled from config.json.
    architecture: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 0
    eos_token_ids: list[int] = field(default_factory=list)

    runner_type: str = "generate"
    is_moe: bool = False
    is_hybrid: bool = False
    is_attention_free: bool = False

    def __post_init__(self) -> None:
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode!r} is not supported; use {', '.join(LOGPROBS_MODES)}"
            )
        check_flags(self, ("enforce_eager",))
        if not (is_integer(self.seed) and -(1 << 63) <= self.seed < 1 << 63):
            raise ConfigError(f"seed={self.seed!r} is not valid: an integer of 64 bits is needed")
        if self.logits_processors is not None and not (
            isinstance(self.logits_processors, list)
            and all(isinstance(item, (str, type)) for item in self.logits_processors)
        ):
            raise ConfigError(
                f"logits_processors={self.logits_processors!r} is not valid: a list of classes or of names of the form "
                "'module:Class' is needed"
            )
        if self.model is None:
            self.model = str(BUNDLED_CHECKPOINT)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model={self.model!r} is not valid: give the directory of a local Hugging Face checkpoint, or leave it "
                "out to use the bundled one"
            )
        path = Path(self.model)
        config_file = path / "config.json"
        if not path.is_dir():
            raise ConfigError(
                f"model {self.model!r} is not a directory; give a local Hugging Face checkpoint, "
                "or leave it out to use the bundled one"
            )
        try:
            config = JsonFile(config_file)
        except FileNotFoundError:
            raise ConfigError(f"{config_file} does not exist; is {self.model!r} a checkpoint?") from None
        self.hf_config = config.data
        self._read_shape(config)
        self._resolve_dtype()
        self._resolve_length()

    def _read_shape(self, config: JsonFile) -> None:
        architectures = config.data.get("architectures") or []
        if not architectures:
            raise ConfigError(
                f"{config.path} does not say which architecture the model has (architectures); "
                f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if not isinstance(architectures, list):
            raise config.error("architectures", "a list of names is needed")
        known = [a for a in architectures if a in SUPPORTED_ARCHITECTURES]
        if not known:
            raise ConfigError(
                f"architecture {architectures} of {self.model!r} is not supported; "
                f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        self.architecture = known[0]
        self.vocab_size = config.integer("vocab_size")
        self.hidden_size = config.integer("hidden_size")
        self.intermediate_size = config.integer("intermediate_size")
        self.num_hidden_layers = config.integer("num_hidden_layers")
        self.num_attention_heads = config.integer("num_attention_heads")
        self.num_key_value_heads = config.integer("num_key_value_heads", self.num_attention_heads)
        self.max_position_embeddings = config.integer("max_position_embeddings")
        if config.data.get("head_dim") is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"{config.path} lacks head_dim, and hidden_size={self.hidden_size} does not divide by "
                f"num_attention_heads={self.num_attention_heads}"
            )
        self.head_dim = config.integer("head_dim", self.hidden_size // self.num_attention_heads)
        self.rms_norm_eps = config.number("rms_norm_eps", 1e-6)
        self.tie_word_embeddings = config.flag("tie_word_embeddings")
        self.attention_bias = config.flag("attention_bias")
        # transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling.
        field = "rope_parameters" if config.data.get("rope_parameters") else "rope_scaling"
        rope = config.table(field)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", None):
            raise ConfigError(
                f"RoPE scaling {kind!r} of {self.model!r} is not supported; only unscaled RoPE is"
            )
        theta = rope.get("rope_theta")
        if theta is not None and not (is_number(theta) and theta > 0):
            raise config.error(field, "its rope_theta has to be a number above 0")
        self.rope_theta = config.number("rope_theta", float(theta or 10000.0))
        if config.flag("use_sliding_window"):
            raise ConfigError(f"sliding-window attention of {self.model!r} is not supported")
        if config.data.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"hidden_act {config.data['hidden_act']!r} of {self.model!r} is not supported; only silu is"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads do not divide by "
                f"{self.num_key_value_heads} key/value heads in {self.model!r}"
            )
        self.eos_token_ids = config.token_ids("eos_token_id")
        try:
            generation = JsonFile(config.path.with_name("generation_config.json"))
        except FileNotFoundError:
            return
        # Also null there takes back what config.json says.
        if "eos_token_id" in generation.data:
            self.eos_token_ids = generation.token_ids("eos_token_id")

    def _resolve_dtype(self) -> None:
        if self.dtype == "auto":
            stored = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype") or "float32"
            # Deviation from vLLM: on a CPU "auto" means float32, since most CPUs emulate bfloat16 slowly.
            self.dtype = "float32" if self.device == "cpu" or stored not in _DTYPES else stored
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; use auto, {', '.join(_DTYPES)}")

    def _resolve_length(self) -> None:
        if self.max_model_len is None:
            self.max_model_len = self.max_position_embeddings
        elif not (is_integer(self.max_model_len) and 2 <= self.max_model_len <= self.max_position_embeddings):
            raise ConfigError(
                f"max_model_len={self.max_model_len!r} is not valid: {self.model!r} allows 2 (a token of prompt and one "
                f"of output) to {self.max_position_embeddings}"
            )

    def verify_with_parallel_config(self, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
        """Raises ConfigError when heads, vocabulary or layers cannot be divided among the ranks."""
        if self.num_attention_heads % tensor_parallel_size:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot be divided among "
                f"tensor_parallel_size={tensor_parallel_size} ranks; choose a divisor"
            )
        kv = self.num_key_value_heads
        if kv % tensor_parallel_size and tensor_parallel_size % kv:
            raise ConfigError(
                f"{kv} key/value heads can be neither divided among nor replicated on "
                f"tensor_parallel_size={tensor_parallel_size} ranks"
            )
        if self.intermediate_size % tensor_parallel_size:
            raise ConfigError(
                f"intermediate_size {self.intermediate_size} cannot be divided among "
                f"tensor_parallel_size={tensor_parallel_size} ranks"
            )
        if pipeline_parallel_size > self.num_hidden_layers:
            raise ConfigError(
                f"pipeline_parallel_size={pipeline_parallel_size} exceeds the model's "
                f"{self.num_hidden_layers} layers"
            )

    def get_num_kv_heads(self, tensor_parallel_size: int) -> int:
        """Key/value heads on one rank; at least one, since fewer heads than ranks are replicated."""
        return max(1, self.num_key_value_heads // tensor_parallel_size)
