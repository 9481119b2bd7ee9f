"""From what the user passes to a request that EngineCore can serve, or a RequestError.

vLLM 0.25.1: vllm/v1/engine/input_processor.py (InputProcessor)
Articles: part 1 intro
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm.config import ModelConfig
from minivllm.engine import EngineCoreReadyResponse, EngineCoreRequest
from minivllm.exceptions import ConfigError, RequestError
from minivllm.sampling_params import SamplingParams
from minivllm.structured_output.backend_guidance import validate_guidance_grammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(model_config: ModelConfig | None) -> Tokenizer | None:
    """The checkpoint's tokenizer.json; None when it has none (then prompts must be token ids)."""
    path = Path(str(model_config.model)) / "tokenizer.json" if model_config is not None else None
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:
        # The library raises plain Exception for a damaged file.
        raise ConfigError(f"{path} cannot be read: {e}") from None


def check_request(
    prompt_token_ids: list[int], params: SamplingParams, limits: EngineCoreReadyResponse
) -> int:
    """Refuse what can never be served. Used by the client, and again by EngineCore, which trusts nobody.

    Returns:
        The number of tokens the request may generate: max_tokens, or less where the model's length ends first.

    Raises:
        RequestError: empty or too long a prompt, ids outside the vocabulary, more than the block pool can hold.
    """
    num_prompt_tokens = len(prompt_token_ids)
    if not num_prompt_tokens:
        raise RequestError("the prompt is empty: at least one token is needed")
    if num_prompt_tokens >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, but prompt and output together may have "
            f"{limits.max_model_len} (max_model_len): shorten it to at most {limits.max_model_len - 1}"
        )
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= limits.vocab_size:
        bad = next(t for t in prompt_token_ids if not 0 <= t < limits.vocab_size)
        raise RequestError(
            f"token id {bad} of the prompt is not in the vocabulary (0 to {limits.vocab_size - 1})"
        )
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids or ():
            if not 0 <= token_id < limits.vocab_size:
                raise RequestError(
                    f"token id {token_id} of {name} is not in the vocabulary (0 to {limits.vocab_size - 1})"
                )
    # The last token is sampled from the ones before it and needs no room of its own.
    room = (limits.num_gpu_blocks - 1) * limits.block_size + 1 - num_prompt_tokens
    max_tokens = limits.max_model_len - num_prompt_tokens
    if params.max_tokens is None:
        max_tokens = min(max_tokens, room)
    else:
        max_tokens = min(max_tokens, params.max_tokens)
    if max_tokens < 1 or max_tokens > room:
        needed = -(-(num_prompt_tokens + max(max_tokens, 1) - 1) // limits.block_size)
        raise RequestError(
            f"the request needs up to {needed} KV cache blocks of {limits.block_size} tokens, but only "
            f"{limits.num_gpu_blocks - 1} exist: shorten the prompt, lower max_tokens, or give the KV cache "
            "more memory"
        )
    return max_tokens


class InputProcessor:
    """Tokenizes and validates prompts.

    Attributes:
        limits: what EngineCore can serve; known once it is ready.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: EngineCoreReadyResponse) -> None:
        self.tokenizer = tokenizer
        self.limits = limits

    def process(
        self, request_id: str, prompt: Any, params: SamplingParams
    ) -> tuple[str | None, EngineCoreRequest]:
        """Returns:
            The prompt's text (None for token ids), and the request.

        Raises:
            RequestError: what is wrong, and what would be right.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        # Attributes can be assigned after construction, where nothing checks them.
        params.verify()
        if params.structured_outputs is not None:
            validate_guidance_grammar(params.structured_outputs)
        if params.bad_words:
            params = self._with_bad_words_as_tokens(params)
        text, token_ids = self._tokenize(prompt)
        check_request(token_ids, params, self.limits)
        return text, EngineCoreRequest(request_id, token_ids, params, time.monotonic())

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                return text if isinstance(text, str) else None, self._token_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise RequestError(
                    f"a prompt dict needs 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer.json: give the prompt as token ids")
            try:
                return prompt, self.tokenizer.encode(prompt).ids
            except Exception as e:
                lone = next((i for i, c in enumerate(prompt) if "\ud800" <= c <= "\udfff"), None)
                if lone is not None:
                    raise RequestError(
                        f"the prompt cannot be tokenized: its character {lone} is {prompt[lone]!r}, half of a surrogate "
                        "pair, which stands for no character by itself (it often comes from bytes that were decoded "
                        "with errors='surrogateescape')"
                    ) from None
                raise RequestError(f"the prompt cannot be tokenized: {e}") from None
        return None, self._token_ids(prompt)

    def _with_bad_words_as_tokens(self, params: SamplingParams) -> SamplingParams:
        """A copy whose bad words are tokens, too: each word with and without a blank before it, since that is
        another token for most tokenizers."""
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, but the checkpoint has no tokenizer.json")
        token_ids: list[list[int]] = []
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False).ids
                if ids and ids not in token_ids:
                    token_ids.append(ids)
        return msgspec.structs.replace(params, bad_words_token_ids=token_ids)

    @staticmethod
    def _token_ids(value: Any) -> list[int]:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise RequestError(
                f"a prompt is a string, a list of token ids or a dict with one of them, not {type(value).__name__}"
            )
        for token_id in value:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"token ids are integers; the prompt contains {token_id!r}")
        return list(value)
