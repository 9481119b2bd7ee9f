"""What one pipeline stage hands to the next.

vLLM 0.25.1: vllm/sequence.py (IntermediateTensors)
Articles: part 1 §8.3, part 2 §2.3.10
"""

from __future__ import annotations

from torch import Tensor


class IntermediateTensors:
    """Hidden states between two stages.

    Attributes:
        tensors: name → `[num_tokens, hidden_size]`; the same names in the same order on both stages.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def first(self, num_tokens: int) -> IntermediateTensors:
        """The same for the first `num_tokens` tokens, without a copy."""
        return IntermediateTensors({name: tensor[:num_tokens] for name, tensor in self.tensors.items()})

    def wait_for_comm(self) -> None:
        """Return when the tensors are there; here they always are."""
