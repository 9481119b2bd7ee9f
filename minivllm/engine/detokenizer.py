"""From token ids to text, token by token, and the search for stop strings.

vLLM 0.25.1: vllm/v1/engine/detokenizer.py (IncrementalDetokenizer, check_stop_strings)
Articles: part 1 intro

Deviation from vLLM: instead of the tokenizers library's DecodeStream, which fails on some invalid UTF-8 and
cannot be given the prompt in older releases, a window of the last tokens is decoded; it costs about 1 µs a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first generated token is decoded after: enough for the rules that depend on
# what stands before a token (leading blanks, multi-byte characters).
_PROMPT_TAIL = 6
# Text that ends in an incomplete character is held back until it is complete; a model that produces nothing
# but invalid bytes must not make the window grow for ever.
_MAX_WINDOW = 256
# Tokens that are decoded together; so few that a lot which ends in half a character is never taken for endless invalid bytes.
_AT_ONCE = 64


class IncrementalDetokenizer:
    """The text of one request.

    Invariants:
        1. `output_text` only grows, until a stop string cuts it.
        2. After finish() it is the text of the whole output (without the stop token or string).

    Attributes:
        token_ids: all generated tokens, the stop token included.
    """

    __slots__ = (
        "_all_ids",
        "_include_stop",
        "_min_tokens",
        "_prefix_length",
        "_prefix_offset",
        "_read_offset",
        "_skip_special_tokens",
        "_stop",
        "_tokenizer",
        "output_text",
        "token_ids",
    )

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._stop: list[str] = list(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._skip_special_tokens = params.skip_special_tokens
        self.token_ids: list[int] = []
        self.output_text = ""
        # Window: text of _all_ids[_prefix_offset:_read_offset] is out already, what follows is not.
        self._all_ids: list[int] = prompt_token_ids[-_PROMPT_TAIL:]
        self._prefix_offset = 0
        self._read_offset = len(self._all_ids)
        self._prefix_length = -1

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take the tokens of a step.

        Args:
            stop_terminated: the last of them is an end-of-text or stop token, whose text is left out.

        Returns:
            The stop string that was found, if any; the text then ends before it (or after it, when it is to be
            included).
        """
        self.token_ids.extend(new_token_ids)
        if self._tokenizer is None:
            return None
        if stop_terminated and not self._include_stop:
            new_token_ids = new_token_ids[:-1]
        if not self._stop:
            for start in range(0, len(new_token_ids), _AT_ONCE):
                self._decode_next(new_token_ids[start : start + _AT_ONCE])
            return None
        num_tokens = len(self.token_ids) - len(new_token_ids)
        for token_id in new_token_ids:
            old_length = len(self.output_text)
            self._decode_next([token_id])
            num_tokens += 1
            if num_tokens > self._min_tokens:
                stop_string = self._cut_at_stop_string(old_length)
                if stop_string is not None:
                    # Deviation from vLLM: tokens that came in the same step behind the stop string (accepted drafts)
                    # are dropped, as if they had never been speculated. There they stay in token_ids.
                    del self.token_ids[num_tokens:]
                    return stop_string
        return None

    def finish(self) -> None:
        """Let out what was held back as an incomplete character."""
        if self._tokenizer is not None and self._read_offset < len(self._all_ids):
            self.output_text += self._decode(self._prefix_offset)[self._known_prefix() :]
            self._read_offset = len(self._all_ids)

    def _decode(self, start: int, end: int | None = None) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(self._all_ids[start:end], skip_special_tokens=self._skip_special_tokens)

    def _known_prefix(self) -> int:
        if self._prefix_length < 0:
            self._prefix_length = len(self._decode(self._prefix_offset, self._read_offset))
        return self._prefix_length

    def _decode_next(self, token_ids: list[int]) -> None:
        self._all_ids += token_ids
        text = self._decode(self._prefix_offset)
        prefix_length = self._known_prefix()
        num_ids = len(self._all_ids)
        if text.endswith(_REPLACEMENT) and num_ids - self._read_offset < _MAX_WINDOW:
            return
        if len(text) > prefix_length:
            self.output_text += text[prefix_length:]
            self._prefix_offset = self._read_offset
            self._read_offset = num_ids
            self._prefix_length = -1

    def _cut_at_stop_string(self, old_length: int) -> str | None:
        found = check_stop_strings(self.output_text, len(self.output_text) - old_length, self._stop)
        if found is None:
            return None
        stop_string, start = found
        self.output_text = self.output_text[: start + len(stop_string) if self._include_stop else start]
        # Nothing may follow the cut, also not what was held back.
        self._read_offset = len(self._all_ids)
        return stop_string


def check_stop_strings(output_text: str, new_char_count: int, stop: list[str]) -> tuple[str, int] | None:
    """Look for stop strings that end in the last `new_char_count` characters.

    Returns:
        The stop string that starts first and where it starts, or None.

    Deviation from vLLM: of several stop strings the one that starts first wins, not the one listed first, so
    that the text never contains a stop string.
    """
    if new_char_count <= 0:
        return None
    best: tuple[str, int] | None = None
    for stop_string in stop:
        start = output_text.find(
            stop_string, max(0, len(output_text) - new_char_count - len(stop_string) + 1)
        )
        if start >= 0 and (best is None or start < best[1]):
            best = stop_string, start
    return best
