"""From hidden states to logits.

vLLM 0.25.1: vllm/model_executor/layers/logits_processor.py (LogitsProcessor)
Articles: part 1 §8.3
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.parallel_state import get_tp_group
from minivllm.model_executor.layers.layer import Layer
from minivllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class LogitsProcessor(Layer):
    """Multiplies with this rank's part of the output head and joins the parts.

    Every rank gets all logits, since every rank samples: the tokens stay on the device, and no rank waits for another
    one's choice.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        tp = get_tp_group()
        self.vocab_size = vocab_size
        self.divided = tp.world_size > 1
        self.all_gather = tp.all_gather

    def forward(self, lm_head: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        """`[n, hidden_size]` → `[n, vocab_size]` in float32, the same bits on all ranks."""
        logits = F.linear(hidden_states, lm_head.head)
        if self.divided:
            logits = self.all_gather(logits, -1)
            if logits.shape[-1] != self.vocab_size:
                logits = logits[:, : self.vocab_size]
        return logits.float()
