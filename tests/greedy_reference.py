"""What a few prompts must yield, greedy by transformers and seeded by the simplest engine; computed once per session."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.config import BUNDLED_CHECKPOINT

MAX_TOKENS = 20
NUM_PROMPTS = 12
SAFE_GAP = 1e-3
WORDS = [
    "the",
    "function",
    "returns",
    "a",
    "class",
    "when",
    "its",
    "argument",
    "is",
    "not",
    "def",
    "import",
    "self",
]


@dataclass(frozen=True)
class Reference:
    """Attributes:
    greedy, seeded: `[NUM_PROMPTS][MAX_TOKENS]`.
    stop: per prompt a token that the greedy output contains, and the output up to it.
    prompt_logprobs: per prompt `[length - 1, vocab_size]` of transformers, about its second token to its last.
    logprobs: per prompt `[MAX_TOKENS, vocab_size]` of transformers, about the greedy output.
    """

    prompts: list[list[int]]
    greedy: list[list[int]]
    seeded: list[list[int]]
    stop: list[tuple[int, list[int]]]
    prompt_logprobs: list[Any]
    logprobs: list[Any]


def greedy_params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def seeded_params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        repetition_penalty=1.1,
        seed=index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )


@functools.cache
def reference() -> Reference:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_CHECKPOINT, dtype=torch.float32).eval()
    prompts: list[list[int]] = []
    greedy: list[list[int]] = []
    prompt_logprobs: list[Any] = []
    logprobs: list[Any] = []
    candidate = 0
    with torch.inference_mode(), warnings.catch_warnings():
        # transformers 5 has a new name for past_key_values, which transformers 4 does not know.
        warnings.simplefilter("ignore", FutureWarning)
        while len(prompts) < NUM_PROMPTS:
            candidate += 1
            text = " ".join(
                WORDS[(candidate * 5 + 3 * j) % len(WORDS)] for j in range(1 + candidate * 7 % 50)
            )
            prompt = tokenizer.encode(text).ids[: 1 + candidate * 13 % 60]
            out = model(torch.tensor([prompt]), use_cache=True)
            rows = [out.logits[0, -1]]
            while len(rows) < MAX_TOKENS:
                step = model(torch.tensor([[int(rows[-1].argmax())]]), past_key_values=out.past_key_values)
                rows.append(step.logits[0, -1])
            best = torch.stack(rows).topk(2).values
            # A smaller distance could be turned by another order of summation.
            if float((best[:, 0] - best[:, 1]).min()) >= SAFE_GAP:
                prompts.append(prompt)
                greedy.append([int(row.argmax()) for row in rows])
                prompt_logprobs.append(out.logits[0, :-1].log_softmax(-1))
                logprobs.append(torch.stack(rows).log_softmax(-1))
    before = os.environ.get("MINIVLLM_ENABLE_MULTIPROCESSING")
    os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = "0"
    try:
        with LLM(device="cpu", dtype="float32", max_model_len=200, distributed_executor_backend="uni") as llm:
            outputs = llm.generate(prompts, [seeded_params(i) for i in range(NUM_PROMPTS)], use_tqdm=False)
    finally:
        if before is None:
            del os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"]
        else:
            os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = before
    stop = [(tokens[5], tokens[: tokens.index(tokens[5]) + 1]) for tokens in greedy]
    seeded = [list(o.outputs[0].token_ids) for o in outputs]
    return Reference(prompts, greedy, seeded, stop, prompt_logprobs, logprobs)
