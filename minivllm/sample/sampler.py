"""V1's sampler: what any row asks for is done to all rows.

vLLM 0.25.1: vllm/v1/sample/sampler.py (Sampler)
Articles: part 1 §7

V2's (worker/gpu/sample/sampler.py) looks at one word of flags per slot, and then touches only the rows that use a
feature; each feature is a file of its own, with its state on the device. What both share are the functions that know
nothing of rows or slots: noise, top-k and top-p, min-p.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sample.logits_processor import LogitsProcessor
from minivllm.sample.metadata import SamplingMetadata
from minivllm.worker.gpu.sample.gumbel import greedy_sample, gumbel_sample
from minivllm.worker.gpu.sample.min_p import apply_min_p
from minivllm.worker.gpu.sample.output import LogprobsTensors
from minivllm.worker.gpu.sample.top_k_top_p import apply_top_k_top_p


class Sampler:
    """From logits to tokens.

    Args:
        logprobs_mode: see ModelConfig.
    """

    def __init__(self, vocab_size: int, logprobs_mode: str) -> None:
        self.vocab_size = vocab_size
        self.reports_raw = logprobs_mode.startswith("raw")
        self.reports_logits = logprobs_mode.endswith("logits")

    def __call__(
        self, logits: Tensor, metadata: SamplingMetadata, positions: Tensor, processors: list[LogitsProcessor]
    ) -> tuple[Tensor, LogprobsTensors | None]:
        """A token for each row, `[num_reqs]`, and the log-probabilities of all rows if any row asks.

        Args:
            logits: `[num_reqs, vocab_size]` float32; overwritten.
            positions: `[num_reqs]` of the token to be chosen.
        """
        num_logprobs = metadata.max_num_logprobs
        raw = logits.clone() if num_logprobs is not None and self.reports_raw else None
        logits = self.apply_logits_processors(logits, metadata, processors)
        if metadata.temperature is not None:
            logits = self.limit(logits, metadata, metadata.temperature, processors)
        # Noise goes into the logits; what is reported must stay without.
        noisy = logits.clone() if num_logprobs is not None and raw is None else logits
        sampled = self.choose(noisy, metadata, positions)
        if num_logprobs is None:
            return sampled, None
        return sampled, self.gather_logprobs(logits if raw is None else raw, num_logprobs, sampled)

    def draw(self, logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> Tensor:
        """A token for each row, `[num_reqs]`, without regard to what the row has seen: for a draft model."""
        if metadata.temperature is not None:
            logits = self.limit(logits, metadata, metadata.temperature, [])
        return self.choose(logits, metadata, positions)

    def limit(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        temperature: Tensor,
        processors: list[LogitsProcessor],
    ) -> Tensor:
        """What makes a choice more or less random, and never changes which token is the most likely."""
        logits.div_(torch.where(temperature > 0, temperature, 1).view(-1, 1))
        for processor in processors:
            if processor.is_argmax_invariant():
                logits = processor.apply(logits)
        if metadata.min_p is not None:
            apply_min_p(logits, metadata.min_p)
        apply_top_k_top_p(logits, metadata.top_k, metadata.top_p, metadata.max_top_k)
        return logits

    def choose(self, logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> Tensor:
        """The most likely token of each row, or one at random; overwrites the logits."""
        if metadata.temperature is None:
            return greedy_sample(logits)
        assert metadata.seeds is not None
        return gumbel_sample(logits, metadata.temperature, metadata.seeds, positions)

    def apply_logits_processors(
        self, logits: Tensor, metadata: SamplingMetadata, processors: list[LogitsProcessor]
    ) -> Tensor:
        """All that may change which token is the most likely; returns the logits, changed in place where possible.

        Deviation from vLLM: biases and min_tokens are logits processors there, each with an update_state of its own
        that follows the rows. Here their tables move with the others.
        """
        for row, bias in metadata.logit_bias.items():
            if bias:
                logits[row, list(bias)] += torch.tensor(list(bias.values()), device=logits.device)
        for row, (min_tokens, stop) in metadata.min_tokens.items():
            if len(metadata.output_token_ids[row]) < min_tokens:
                logits[row, stop] = float("-inf")
        for processor in processors:
            if not processor.is_argmax_invariant():
                logits = processor.apply(logits)
        if metadata.prompt_mask is not None:
            self.apply_penalties(logits, metadata)
        for row, words in metadata.bad_words_token_ids.items():
            output = metadata.output_token_ids[row]
            for *prefix, last in words:
                if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
                    logits[row, last] = float("-inf")
        return logits

    def apply_penalties(self, logits: Tensor, metadata: SamplingMetadata) -> None:
        """Penalise what each row has seen, in place.

        V2 (PenaltiesState) keeps the counts on the device and adds one token per step. Here the outputs live on the CPU
        as lists, and the counts are made from them anew in each step.
        """
        repetition, presence = metadata.repetition_penalties, metadata.presence_penalties
        frequency, in_prompt = metadata.frequency_penalties, metadata.prompt_mask
        assert repetition is not None and presence is not None
        assert frequency is not None and in_prompt is not None
        counts_np = np.stack(
            [
                np.bincount(np.array(output, dtype=np.int64), minlength=self.vocab_size)
                for output in metadata.output_token_ids
            ]
        )
        counts = torch.from_numpy(counts_np.astype(np.int32)).to(logits.device)
        in_output = counts > 0
        factor = torch.where(logits > 0, 1 / repetition, repetition)
        logits.copy_(torch.where(in_prompt | in_output, logits * factor, logits))
        logits -= counts * frequency
        logits -= in_output * presence

    def gather_logprobs(self, logits: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """The given tokens' values and those of the `num_logprobs` most likely, `[n, num_logprobs + 1]`."""
        values = logits.float() if self.reports_logits else logits.log_softmax(dim=-1, dtype=torch.float32)
        chosen = token_ids.view(-1, 1)
        chosen_values = values.gather(1, chosen)
        ranks = (values >= chosen_values).sum(dim=-1)
        top_values, top_ids = values.topk(min(num_logprobs, values.shape[-1]), dim=-1)
        return LogprobsTensors(
            torch.cat((chosen, top_ids), dim=1), torch.cat((chosen_values, top_values), dim=1), ranks
        )
