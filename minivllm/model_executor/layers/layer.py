"""The base of all layers: torch modules that are cheap to call and know which part of a tensor is theirs.

vLLM 0.25.1: torch.nn.Module with weight_loader attributes (vllm/model_executor/utils.py, set_weight_attrs)
Articles: part 1 §8.2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minivllm.model_executor.model_loader.weight_utils import WeightSlice


class Layer(nn.Module):
    """A torch module without hooks.

    A decode step calls about fifty modules. The hook checks of nn.Module.__call__ and its search for submodules and
    parameters cost 1.6 µs each time, a tenth of a step of a small model. Here `layer(x)` is `layer.forward(x)`, and
    submodules and parameters are ordinary attributes as well.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, Tensor)):
            self.__dict__[name] = value

    def load_weight(self, name: str, weight: WeightSlice, shard_id: str | int | None) -> None:
        """Fill parameter `name`, or the part of it that `shard_id` names, with this rank's part of `weight`.

        Raises:
            ConfigError: `weight` has another shape than the whole parameter.
        """
        parameter = self.get_parameter(name)
        weight.expect_shape(tuple(parameter.shape))
        parameter.copy_(weight.read())

    def process_weights_after_loading(self) -> None:
        """Prepare what is derived from the weights; called once, when all are loaded."""


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter to be filled by load_weight."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
