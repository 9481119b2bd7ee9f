"""What a loader and a runner need from a model.

vLLM 0.25.1: vllm/model_executor/models/interfaces.py, utils.py (is_pp_missing_parameter)
Articles: part 1 §8.2
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from minivllm.model_executor.layers.attention import Attention
from minivllm.model_executor.layers.layer import Layer
from minivllm.sequence import IntermediateTensors


class CausalLM(Layer):
    """A text model that predicts the next token.

    Attributes:
        packed_modules_mapping: module here -> modules of the checkpoint that it holds side by side, by shard id.
    """

    packed_modules_mapping: ClassVar[dict[str, dict[str | int, str]]] = {}

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: IntermediateTensors | None = None
    ) -> Tensor | IntermediateTensors:
        """Compute the layers of this pipeline stage.

        Args:
            input_ids, positions: `[num_tokens]`.
            intermediate_tensors: what the stage before has computed; None on the first stage.

        Returns:
            Hidden states `[num_tokens, hidden_size]` on the last stage, on others what the next one needs.
        """

    @abstractmethod
    def make_empty_intermediate_tensors(self, num_tokens: int) -> IntermediateTensors:
        """Zeros to receive what the stage before computes for `num_tokens` tokens."""

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`[n, hidden_size]` → `[n, vocab_size]` float32, on every rank of the last stage."""

    @abstractmethod
    def attention_layers(self) -> Iterator[Attention]:
        """The attention layers of this rank, in layer order."""

    @abstractmethod
    def weight_names(self) -> Iterator[tuple[str, Layer, str, str | int | None]]:
        """(name in the checkpoint, layer, parameter, shard id) of each tensor that this rank needs."""

    @abstractmethod
    def is_pp_missing_parameter(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to another pipeline stage."""
