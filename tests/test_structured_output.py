"""Output that obeys a schema, an expression or a choice, whatever else is in the batch and however it is scheduled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_processes

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.config import BUNDLED_CHECKPOINT
from minivllm.exceptions import RequestError
from minivllm.structured_output.backend_guidance import GuidanceBackend
from minivllm.trace_store import TraceStore

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["class", "function", "module"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 9999},
        "name": {"type": "string", "pattern": "^[a-z_]{1,8}$"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["kind", "line", "name", "tags"],
    "additionalProperties": False,
}
BUNDLED_EOS = 0
NUMBER = r"[1-9][0-9]{0,3}\.[0-9]{2}"
WORDS = [
    "def",
    "class",
    'quoted "word"',
    "back\\slash",
    "new\nline",
    "tabulator\t",
    "/slash/",
    "naïve – ok",
    "a|b",
    "\x00\x7f\u2028",
    "\U0001f600",
]


def valid(text: str) -> bool:
    """Whether `text` is a document of SCHEMA."""
    document = json.loads(text)
    return (
        list(document) == ["kind", "line", "name", "tags"]
        and document["kind"] in ("class", "function", "module")
        and type(document["line"]) is int
        and 0 <= document["line"] <= 9999
        and re.fullmatch("[a-z_]{1,8}", document["name"]) is not None
        and len(document["tags"]) <= 3
        and set(document["tags"]) <= {"x", "y"}
    )


def params(seed: int = 0, temperature: float = 1.0, max_tokens: int = 100, **kind: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**kind) if kind else None,
    )


# In front of all that use the fixture: a process holds one engine at a time.
def test_preemption_and_chunked_prefill_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "0")
    prompts = ["the function returns a class when its argument is not " * (1 + i % 3) for i in range(12)]
    requests = [params(seed, json=SCHEMA) if seed % 3 else params(seed, max_tokens=30) for seed in range(12)]
    with LLM(max_num_seqs=12, device="cpu") as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, requests)]
    with LLM(
        max_num_seqs=12, max_num_batched_tokens=24, block_size=8, num_gpu_blocks_override=40, device="cpu"
    ) as llm:
        outputs = llm.generate(prompts, requests)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        core.scheduler.check_invariants()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"] = "0"
    try:
        with LLM(max_num_seqs=64, device="cpu") as llm:
            yield llm
    finally:
        del os.environ["MINIVLLM_ENABLE_MULTIPROCESSING"]


def test_json_schema_output_is_valid_for_200_seeds(llm: LLM) -> None:
    requests = [params(seed, json=SCHEMA if seed % 2 else json.dumps(SCHEMA)) for seed in range(200)]
    outputs = llm.generate(["the class of a"] * 200, requests)
    texts = [output.outputs[0].text for output in outputs]
    assert all(valid(text) for text in texts), texts
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert len(set(texts)) > 150


def test_regex(llm: LLM) -> None:
    outputs = llm.generate(["x = "] * 40, [params(seed, regex=NUMBER) for seed in range(40)])
    for output in outputs:
        assert re.fullmatch(NUMBER, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


def test_choice(llm: LLM) -> None:
    outputs = llm.generate(["return"] * 60, [params(seed, choice=WORDS) for seed in range(60)])
    texts = [output.outputs[0].text for output in outputs]
    assert set(texts) <= set(WORDS)
    assert len(set(texts)) > 3


@pytest.mark.parametrize("word", WORDS)
def test_each_choice_can_be_had_whatever_is_in_it(llm: LLM, word: str) -> None:
    assert llm.generate("a", params(choice=[word]))[0].outputs[0].text == word


def test_the_end_of_the_grammar_ends_the_request_without_one_more_step(llm: LLM) -> None:
    output = llm.generate("a", params(choice=["def"], temperature=0))[0].outputs[0]
    assert (
        output.finish_reason == "stop" and output.stop_reason is None and BUNDLED_EOS not in output.token_ids
    )
    # The last token that max_tokens allows may also be the one that completes the text.
    again = llm.generate("a", params(choice=["def"], max_tokens=len(output.token_ids), temperature=0))[0]
    assert (again.outputs[0].text, again.outputs[0].finish_reason) == ("def", "stop")
    # With ignore_eos, too: the text is complete, and nothing may follow.
    endless = params(choice=["def"])
    endless.ignore_eos = True
    assert llm.generate("a", endless)[0].outputs[0].text == "def"


def test_an_expression_that_may_end_and_may_go_on(llm: LLM) -> None:
    outputs = llm.generate(["a"] * 30, [params(seed, max_tokens=12, regex="(ab )+") for seed in range(30)])
    reasons = set()
    for output in outputs:
        completion = output.outputs[0]
        reasons.add(completion.finish_reason)
        if completion.finish_reason == "stop":
            assert re.fullmatch("(ab )+", completion.text)
        else:
            assert completion.finish_reason == "length" and len(completion.token_ids) == 12
    assert "length" in reasons


def test_free_requests_in_the_same_batch_are_left_alone(llm: LLM) -> None:
    free = [params(seed, max_tokens=20) for seed in range(8)] + [params(temperature=0, max_tokens=20)]
    alone = llm.generate(["the function"] * len(free), free)
    bound = [params(seed, json=SCHEMA) for seed in range(9)]
    mixed = llm.generate(["the function"] * 18, [p for pair in zip(free, bound, strict=True) for p in pair])
    assert [o.outputs[0].token_ids for o in mixed[::2]] == [o.outputs[0].token_ids for o in alone]
    assert all(valid(o.outputs[0].text) for o in mixed[1::2])


def test_forbidden_tokens_have_no_probability(llm: LLM) -> None:
    request = params(regex="[0-9]{4}")
    request.logprobs = 3
    output = llm.generate("x", request)[0].outputs[0]
    assert output.logprobs is not None
    for row, token in zip(output.logprobs, output.token_ids, strict=True):
        assert row[token].logprob <= 0 and row[token].logprob > -50


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ({"json": "{bad"}, "the JSON schema is no JSON"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(["}, "the regex of structured_outputs cannot be used"),
    ],
)
def test_a_wrong_grammar_is_refused_by_name(llm: LLM, kind: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        llm.generate("a", params(**kind))
    with pytest.raises(RequestError, match=f"prompt 1: .*{text}"):
        llm.generate(["a", "b"], [params(), params(**kind)])


def test_parameters_that_contradict_themselves() -> None:
    with pytest.raises(RequestError, match="exactly one of json, regex and choice; none was given"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match="regex and choice were given"):
        StructuredOutputsParams(regex="a", choice=["b"])
    for wrong in ({"choice": []}, {"choice": [""]}, {"choice": "ab"}, {"regex": ""}, {"json": 3}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            StructuredOutputsParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"'jason' .* did you mean json"):
        StructuredOutputsParams(jason="{}")  # type: ignore[call-arg]
    for other in ({"min_tokens": 2}, {"bad_words": ["a"]}):
        with pytest.raises(RequestError, match=next(iter(other))):
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **other)  # type: ignore[arg-type]


def test_a_grammar_that_a_bias_leaves_no_token_for(llm: LLM) -> None:
    request = params(choice=["def"])
    vocab_size = llm.llm_engine.input_processor.limits.vocab_size
    request.logit_bias = dict.fromkeys(range(1, vocab_size), float("-inf"))
    with pytest.raises(RequestError, match="the grammar does not allow token 0"):
        llm.generate("a", request)
    assert llm.generate("a", params(choice=["def"]))[0].outputs[0].text == "def"


def test_a_compiled_grammar_is_used_again() -> None:
    backend = GuidanceBackend(BUNDLED_CHECKPOINT / "tokenizer.json", 2048, [BUNDLED_EOS])
    one, other = (backend.compile_grammar(StructuredOutputsParams(regex="ab")) for _ in range(2))
    assert len(backend._compiled) == 1
    a, b = (backend.ll_tokenizer.tokenize_str(c)[0] for c in "ab")
    assert one.accept_token(a) is None and one.accept_token(b) is None and one.is_terminated()
    assert not other.is_terminated() and other.accept_token(a) is None
    assert other.accept_token(a) is not None
    for i in range(100):
        backend.compile_grammar(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    assert len(backend._compiled) <= 64


def test_without_the_library_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from minivllm.structured_output.backend_guidance import validate_guidance_grammar as check\n"
        "from minivllm import StructuredOutputsParams\n"
        "try: check(StructuredOutputsParams(regex='a'))\n"
        "except ValueError as e: print(e)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "pip install 'minivllm[structured]'" in run.stdout


ENGINES = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2-async": {"tensor_parallel_size": 2, "async_scheduling": True},
    "pp2-async": {"pipeline_parallel_size": 2, "async_scheduling": True},
}


@pytest.mark.parametrize("name", ENGINES)
def test_over_processes(llm: LLM, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in processes of their own, and once EngineCore, too; that trace shows what was masked, and when."""
    trace = tmp_path / "trace" if name == "tp2" else None
    requests = [params(seed, json=SCHEMA) if seed % 2 else params(seed, max_tokens=10) for seed in range(8)]
    expected = llm.generate(["the class"] * 8, requests)
    if trace is not None:
        monkeypatch.setenv("MINIVLLM_ENABLE_MULTIPROCESSING", "1")
    else:
        warm_processes.use(monkeypatch)
    with LLM(device="cpu", trace=trace, **ENGINES[name]) as other:
        outputs = other.generate(["the class"] * 8, requests)
    for seed, output in enumerate(outputs):
        assert output.outputs[0].token_ids == expected[seed].outputs[0].token_ids
        assert valid(output.outputs[0].text) if seed % 2 else len(output.outputs[0].token_ids) <= 10
    if trace is None:
        return
    spans = TraceStore.open(trace).spans("runner.apply_grammar")
    assert spans
    assert all(1 <= span.attributes["minivllm.requests"] <= 4 for span in spans)
    assert all(span.attributes["minivllm.allowed"] >= 1 for span in spans)
