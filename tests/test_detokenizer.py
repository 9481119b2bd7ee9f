"""Text from tokens, one by one, and stop strings."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.engine.detokenizer import IncrementalDetokenizer, check_stop_strings
from minivllm.sampling_params import SamplingParams


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(BUNDLED_CHECKPOINT) / "tokenizer.json"))


def detokenize(ids: list[int], prompt: list[int] | None = None, **params: object) -> IncrementalDetokenizer:
    detokenizer = IncrementalDetokenizer(tokenizer(), prompt or [], SamplingParams(max_tokens=4096, **params))
    for token_id in ids:
        if detokenizer.update([token_id], stop_terminated=False) is not None:
            return detokenizer
    detokenizer.finish()
    return detokenizer


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(max_size=10))
def test_any_text_comes_back(text: str, prompt: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    prompt = prompt.encode("utf-8", "ignore").decode()
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    prompt_ids = tokenizer().encode(prompt, add_special_tokens=False).ids
    assert detokenize(ids, prompt_ids, skip_special_tokens=False).output_text == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=80))
def test_arbitrary_tokens_give_the_text_of_the_whole(ids: list[int]) -> None:
    """Invariant 2, also for bytes that are no characters."""
    detokenizer = detokenize(ids)
    assert detokenizer.output_text == tokenizer().decode(ids)
    assert detokenizer.token_ids == ids


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2047), max_size=100), max_size=6),
    st.sampled_from([[], ["ab"], ["e ", "\ufffd"]]),
)
def test_it_does_not_matter_how_many_tokens_come_at_once(lots: list[list[int]], stop: list[str]) -> None:
    ids = list(itertools.chain.from_iterable(lots))
    params = SamplingParams(max_tokens=4096, stop=stop)
    one_by_one, by_lots = (IncrementalDetokenizer(tokenizer(), [5, 6], params) for _ in range(2))
    found = [
        next(filter(None, (each.update(lot, False) for lot in these)), None)
        for each, these in ((one_by_one, [[token_id] for token_id in ids]), (by_lots, lots))
    ]
    one_by_one.finish()
    by_lots.finish()
    assert found[0] == found[1]
    assert one_by_one.output_text == by_lots.output_text
    assert one_by_one.token_ids == by_lots.token_ids


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=60))
def test_text_only_grows(ids: list[int]) -> None:
    """Invariant 1."""
    detokenizer = IncrementalDetokenizer(tokenizer(), [], SamplingParams())
    before = ""
    for token_id in ids:
        detokenizer.update([token_id], False)
        assert detokenizer.output_text.startswith(before)
        before = detokenizer.output_text


def test_endless_invalid_bytes_do_not_take_quadratic_time() -> None:
    bad = next(i for i in range(2048) if tokenizer().decode([i]) == "�")
    detokenizer = IncrementalDetokenizer(tokenizer(), [], SamplingParams())
    for _ in range(2000):
        detokenizer.update([bad], False)
    detokenizer.finish()
    assert detokenizer.output_text == "�" * 2000


def test_a_stop_string_over_several_tokens_cuts_the_text() -> None:
    ids = tokenizer().encode("one two three four").ids
    cut = detokenize(ids, stop=["o th"])
    assert cut.output_text == "one tw"
    kept = detokenize(ids, stop=["o th"], include_stop_str_in_output=True)
    assert kept.output_text == "one two th"
    assert detokenize(ids, stop=["absent"]).output_text == "one two three four"


def test_min_tokens_holds_stop_strings_off() -> None:
    ids = tokenizer().encode("aa aa aa aa").ids
    detokenizer = IncrementalDetokenizer(tokenizer(), [], SamplingParams(stop="aa", min_tokens=3))
    found = [detokenizer.update([token_id], False) for token_id in ids]
    assert not any(found[:3])
    assert "aa" in found


def test_the_stop_token_is_counted_but_has_no_text() -> None:
    ids = tokenizer().encode("abc def").ids
    detokenizer = IncrementalDetokenizer(tokenizer(), [], SamplingParams())
    detokenizer.update(ids[:-1], False)
    text = detokenizer.output_text
    detokenizer.update(ids[-1:], True)
    detokenizer.finish()
    assert detokenizer.output_text == text
    assert detokenizer.token_ids == ids


def test_special_tokens_are_left_out_unless_wanted() -> None:
    ids = [*tokenizer().encode("end").ids, 0]
    assert detokenize(ids).output_text == "end"
    assert detokenize(ids, skip_special_tokens=False).output_text == "end<|endoftext|>"


@pytest.mark.parametrize(
    ("text", "new", "stop", "found"),
    [
        ("hello world", 11, ["world"], ("world", 6)),
        ("hello world", 1, ["world"], ("world", 6)),
        ("hello world", 1, ["hello"], None),
        ("abcd", 4, ["cd", "bc"], ("bc", 1)),
        ("abcd", 0, ["d"], None),
        ("ab", 2, ["abc"], None),
    ],
)
def test_check_stop_strings(text: str, new: int, stop: list[str], found: tuple[str, int] | None) -> None:
    assert check_stop_strings(text, new, stop) == found


def test_without_a_tokenizer_only_ids_come_out() -> None:
    detokenizer = IncrementalDetokenizer(None, [1], SamplingParams())
    assert detokenizer.update([5, 6], False) is None
    detokenizer.finish()
    assert detokenizer.token_ids == [5, 6] and detokenizer.output_text == ""
