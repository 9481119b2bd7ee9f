"""Build a model and fill it from a local checkpoint.

vLLM 0.25.1: vllm/model_executor/model_loader/default_loader.py (DefaultModelLoader), utils.py (initialize_model)
Articles: part 1 §8.2
"""

from __future__ import annotations

from pathlib import Path

import torch

from minivllm import tracing
from minivllm.config import ModelConfig, VllmConfig
from minivllm.distributed.parallel_state import PipelineStage, get_pp_group
from minivllm.exceptions import ConfigError
from minivllm.model_executor.layers.layer import Layer
from minivllm.model_executor.model_loader.weight_utils import ReadStatistics, SafetensorsCheckpoint
from minivllm.model_executor.models.interfaces import CausalLM
from minivllm.model_executor.models.registry import resolve_model_cls

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Derived from config.json, and written by old releases of transformers all the same.
_DERIVED = "rotary_emb.inv_freq"


class DefaultModelLoader:
    """Loads safetensors checkpoints as Hugging Face writes them."""

    @torch.no_grad()
    def load_model(self, vllm_config: VllmConfig, device: torch.device) -> CausalLM:
        """The model of the configuration with its weights on `device`, this rank's part of it.

        Raises:
            ConfigError: a tensor is missing, unexpected or of the wrong shape; the text names it and its file.
        """
        model_config = vllm_config.model_config
        assert model_config is not None
        with tracing.span("model.initialize", architecture=model_config.architecture) as s:
            stage = PipelineStage(0, 1)
            if vllm_config.parallel_config.pipeline_parallel_size > 1:
                stage = PipelineStage(get_pp_group().rank_in_group, get_pp_group().world_size)
            model = resolve_model_cls(model_config.architecture)(
                model_config, DTYPES[model_config.dtype], device, stage
            )
            parameters = list(model.parameters())
            s.set(
                modules=sum(1 for _ in model.modules()),
                parameters=sum(p.numel() for p in parameters),
                bytes=sum(p.nbytes for p in parameters),
            )
        with tracing.span("model.load_weights", model=str(model_config.model)) as s:
            statistics, num_files, shards = self.load_weights(model, model_config)
            s.set(
                files=num_files,
                tensors=statistics.num_tensors,
                bytes=statistics.bytes_read,
                bytes_of_whole_tensors=statistics.bytes_whole,
                shards=shards,
            )
        return model

    def load_weights(self, model: CausalLM, config: ModelConfig) -> tuple[ReadStatistics, int, str]:
        """Fill every parameter; returns what was read, from how many files, and which part of which kind of tensor."""
        checkpoint = SafetensorsCheckpoint(Path(str(config.model)))
        unexpected = set(checkpoint.file_of)
        parts: dict[str, str] = {}
        for name, layer, parameter, shard_id in model.weight_names():
            weight = checkpoint.get(name)
            before = checkpoint.statistics.bytes_read
            layer.load_weight(parameter, weight, shard_id)
            unexpected.discard(name)
            if tracing.active:
                kind = name.rpartition(".layers.")[2].partition(".")[2] if ".layers." in name else name
                parts.setdefault(
                    kind, f"{checkpoint.statistics.bytes_read - before} B of {list(weight.shape)}"
                )
        if config.tie_word_embeddings:
            unexpected.discard("lm_head.weight")
        unexpected = {
            name
            for name in unexpected
            if not name.endswith(_DERIVED) and not model.is_pp_missing_parameter(name)
        }
        if unexpected:
            name = min(unexpected)
            raise ConfigError(
                f"{len(unexpected)} tensors of the checkpoint have no place in {config.architecture}, among them "
                f"{name!r} in {checkpoint.file_of[name]}"
            )
        for module in model.modules():
            if isinstance(module, Layer):
                module.process_weights_after_loading()
        shards = "; ".join(f"{kind}: {part}" for kind, part in parts.items())
        num_files = checkpoint.num_files
        checkpoint.close()
        return checkpoint.statistics, num_files, shards
