"""Grammars by the library llguidance, which walks the vocabulary as a trie and needs no torch.

vLLM 0.25.1: vllm/v1/structured_output/backend_guidance.py (GuidanceBackend, GuidanceGrammar,
serialize_guidance_grammar, validate_guidance_grammar)
Articles: part 2 §2.3.5
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.exceptions import RequestError
from minivllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np

# Compiled grammars that are kept for requests to come; one is some tens of kilobytes.
_MAX_COMPILED = 64


def _llguidance() -> Any:
    """The library, imported where it is needed only: it is an extra."""
    try:
        import llguidance
        import llguidance.numpy
    except ImportError:
        raise RequestError(
            "structured_outputs needs the package llguidance; install it with: pip install 'minivllm[structured]'"
        ) from None
    return llguidance


def serialize_guidance_grammar(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own language. Raises RequestError for text that is no JSON."""
    matcher = _llguidance().LLMatcher
    grammar: str
    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as e:
                raise RequestError(f"the JSON schema is no JSON: {e}") from None
        # Deviation from vLLM: no blanks between the parts. There they are allowed unless the engine is told
        # otherwise, and a model may then go on with blanks until max_tokens, without ever getting to an end.
        grammar = matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    elif params.regex is not None:
        grammar = matcher.grammar_from_regex(params.regex)
    else:
        # By number, as there is no character that some parser on the way could not take for something else.
        texts = ["".join(f"\\x{{{ord(char):x}}}" for char in text) for text in params.choice or ()]
        grammar = matcher.grammar_from_regex("|".join(texts))
    return grammar


def validate_guidance_grammar(params: StructuredOutputsParams) -> None:
    """For the client, which has no use for the grammar itself. Raises RequestError."""
    error = _llguidance().LLMatcher.validate_grammar(serialize_guidance_grammar(params))
    if error:
        raise _refusal(params, error)


def _refusal(params: StructuredOutputsParams, error: str) -> RequestError:
    what = "JSON schema" if params.json is not None else "regex" if params.regex is not None else "choice"
    return RequestError(f"the {what} of structured_outputs cannot be used: {error.strip()}")


class GuidanceBackend:
    """Compiles grammars for one vocabulary.

    Args:
        tokenizer_file: tokenizer.json of the checkpoint.
        vocab_size: of the model, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        llguidance = _llguidance()
        if not eos_token_ids:
            raise RequestError("structured_outputs needs an end-of-text token, but the checkpoint names none")
        try:
            self.ll_tokenizer = llguidance.LLTokenizer(
                tokenizer_file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=eos_token_ids
            )
        except ValueError as e:
            raise RequestError(f"structured_outputs does not work with {tokenizer_file}: {e}") from None
        self.vocab_size = vocab_size
        self._compiled: dict[str, Any] = {}

    def compile_grammar(self, params: StructuredOutputsParams) -> GuidanceGrammar:
        """A grammar at its start. Raises RequestError."""
        grammar = serialize_guidance_grammar(params)
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = _llguidance().LLMatcher(self.ll_tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise _refusal(params, matcher.get_error())
            if len(self._compiled) == _MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = matcher
        return GuidanceGrammar(matcher.deep_copy())

    def allocate_token_bitmask(self, num_rows: int) -> np.ndarray:
        """`[num_rows, ceil(vocab_size / 32)]` int32, all tokens allowed."""
        bitmask: np.ndarray = _llguidance().numpy.allocate_token_bitmask(num_rows, self.vocab_size)
        return bitmask


class GuidanceGrammar:
    """How far one request has come in its grammar."""

    __slots__ = ("ll_matcher",)

    def __init__(self, ll_matcher: Any) -> None:
        self.ll_matcher = ll_matcher

    def accept_token(self, token_id: int) -> str | None:
        """Advance. Returns None, or why the token cannot come here; there is no way on then."""
        if self.ll_matcher.consume_token(token_id):
            return None
        # The first line says it; what follows is the parser's state.
        return str(self.ll_matcher.get_error()).strip().splitlines()[0]

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """As many of the tokens, from the first on, as could come next. Does not advance."""
        return token_ids[: self.ll_matcher.validate_tokens(token_ids)] if token_ids else token_ids

    def rollback(self, num_tokens: int) -> None:
        """Take accepted tokens back."""
        if num_tokens:
            self.ll_matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Whether nothing can follow, an end-of-text token perhaps excepted."""
        stopped: bool = self.ll_matcher.is_stopped()
        return stopped

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """Write which tokens may come next. A grammar that has failed allows the end-of-text token alone."""
        _llguidance().numpy.fill_next_token_bitmask(self.ll_matcher, bitmask, row)
