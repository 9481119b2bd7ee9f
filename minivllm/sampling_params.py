"""What a caller may ask of sampling for one request.

vLLM 0.25.1: vllm/sampling_params.py (SamplingParams, StructuredOutputsParams)
Articles: part 1 §8.2, part 2 §2.3.5
"""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from minivllm.exceptions import RequestError

# Workers keep counts and token ids in 32-bit tensors.
_INT_MAX = (1 << 31) - 1
# Where a name of vLLM's exists that minivllm lacks, a name like it would be another thing.
_ONLY_IN_VLLM = {
    "SamplingParams": (
        "allowed_token_ids",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "logprob_token_ids",
        "output_kind",
        "spaces_between_special_tokens",
    ),
    "StructuredOutputsParams": (
        "disable_additional_properties",
        "disable_any_whitespace",
        "grammar",
        "json_object",
        "structural_tag",
        "whitespace_pattern",
    ),
}


class _NamesItsArguments(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes an unknown or superfluous argument a RequestError that says what would be right."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as e:
            known = cls.__struct_fields__
            unknown = [name for name in kwargs if name not in known]
            if not unknown:
                raise RequestError(f"arguments of {cls.__name__} are not valid: {e}") from None
            if unknown[0] in _ONLY_IN_VLLM[cls.__name__]:
                raise RequestError(
                    f"{unknown[0]!r} is an argument of vLLM's {cls.__name__} that minivllm does not have; known are "
                    f"{', '.join(known)}"
                ) from None
            nearest = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise RequestError(f"{unknown[0]!r} is not an argument of {cls.__name__}; {hint}") from None


class StructuredOutputsParams(
    msgspec.Struct, metaclass=_NamesItsArguments, omit_defaults=True, forbid_unknown_fields=True
):
    """What the output must look like; exactly one of the three is given.

    Attributes:
        json: a JSON schema, as a dict or as text. Blanks between the parts of a document are not generated.
        regex: the whole output matches it.
        choice: the output is one of these.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raises RequestError. Whether a schema or expression makes sense is for the grammar library to say."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs needs exactly one of json, regex and choice; "
                + (f"{' and '.join(given)} were given" if given else "none was given")
            )
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise RequestError(f"json={self.json!r} is not valid: a JSON schema as a dict or a string")
        if self.regex is not None and not (isinstance(self.regex, str) and self.regex):
            raise RequestError(f"regex={self.regex!r} is not valid: a string that is not empty")
        if self.choice is not None and not (
            isinstance(self.choice, list)
            and self.choice
            and all(isinstance(text, str) and text for text in self.choice)
        ):
            raise RequestError(
                f"choice={self.choice!r} is not valid: a list of strings, none of them empty, and at least one"
            )


class SamplingParams(
    msgspec.Struct, metaclass=_NamesItsArguments, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling settings of one request; names and defaults are vLLM's.

    Attributes:
        max_tokens: upper limit of generated tokens (None: until the model length is reached).
        min_tokens: eos and stop tokens are suppressed before that many tokens.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the most likely one.
        seed: seed of this request alone; tokens then do not depend on what else is in the batch.
        repetition_penalty, presence_penalty, frequency_penalty: as in vLLM.
        stop: strings that end the request; the string itself is not part of the text.
        stop_token_ids: tokens that end the request.
        ignore_eos: go on after the end-of-text token.
        logprobs: number of alternatives to report per generated token (None: none).
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        logit_bias: token id -> value added to its logit.
        bad_words: strings that must not be generated.
        bad_words_token_ids: the same as tokens; the input processor fills it, since workers have no tokenizer.
        structured_outputs: a schema, expression or choice that the output obeys; it ends when nothing can follow.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.verify()

    def verify(self) -> None:
        """Raises RequestError, naming the argument, its value and what is allowed."""

        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{name}={getattr(self, name)!r} is not valid: {rule}")

        def number(value: Any) -> bool:
            # NaN compares false with everything, so ranges below would let "not < 0" forms pass.
            return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value

        def integer(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def small(value: Any) -> bool:
            return integer(value) and -_INT_MAX <= value <= _INT_MAX

        need(integer(self.n) and self.n == 1, "n", "only n=1 is supported; repeat the prompt instead")
        need(
            self.max_tokens is None or (small(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            f"an integer from 1 to {_INT_MAX}, or None",
        )
        need(
            small(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            f"an integer from 0 to {_INT_MAX}",
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        need(
            number(self.temperature) and 0 <= self.temperature < float("inf"),
            "temperature",
            "a finite number of at least 0",
        )
        need(
            small(self.top_k) and self.top_k >= -1,
            "top_k",
            f"an integer from 1 to {_INT_MAX}, or 0 / -1 for all",
        )
        need(number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        need(number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number in [0, 1]")
        need(
            self.seed is None or (integer(self.seed) and -(1 << 63) <= self.seed < 1 << 63),
            "seed",
            "a 64-bit integer or None",
        )
        need(
            number(self.repetition_penalty) and 0 < self.repetition_penalty < float("inf"),
            "repetition_penalty",
            "a finite number above 0",
        )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            need(isinstance(getattr(self, name), bool), name, "True or False")
        for name in ("presence_penalty", "frequency_penalty"):
            need(number(getattr(self, name)) and -2 <= getattr(self, name) <= 2, name, "a number in [-2, 2]")
        need(
            self.stop is None
            or (isinstance(self.stop, list) and all(isinstance(s, str) and s for s in self.stop)),
            "stop",
            "a string or a list of strings, none of them empty",
        )
        need(
            self.stop_token_ids is None
            or (isinstance(self.stop_token_ids, list) and all(small(t) for t in self.stop_token_ids)),
            "stop_token_ids",
            "a list of token ids",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(
                value is None or (integer(value) and 0 <= value <= 20),
                name,
                "an integer from 0 to 20, or None",
            )
        need(
            self.logit_bias is None
            or (
                isinstance(self.logit_bias, dict)
                and all(small(k) and number(v) for k, v in self.logit_bias.items())
            ),
            "logit_bias",
            "a dict of token id -> number",
        )
        need(
            self.bad_words is None
            or (isinstance(self.bad_words, list) and all(isinstance(s, str) and s for s in self.bad_words)),
            "bad_words",
            "a list of strings, none of them empty",
        )
        if self.structured_outputs is not None:
            need(
                isinstance(self.structured_outputs, StructuredOutputsParams),
                "structured_outputs",
                "StructuredOutputsParams(json=…), (regex=…) or (choice=…)",
            )
            self.structured_outputs.verify()
            # Either could forbid the only token that the grammar allows.
            for name in ("min_tokens", "bad_words"):
                if getattr(self, name):
                    raise RequestError(
                        f"{name} cannot be combined with structured_outputs; leave one of them out"
                    )

    @property
    def is_greedy(self) -> bool:
        """Below this temperature dividing the logits would overflow; vLLM treats it as greedy, too."""
        return self.temperature < 1e-5
