"""The bundled checkpoint and the script that makes it: transformers must load what it writes, without leftovers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from minivllm.assets import corpus, training
from minivllm.assets.checkpoint_files import BUNDLED
from minivllm.assets.make_checkpoint import PRESETS, SAMPLE_PROMPTS, main, make_random_checkpoint

PROMPT_IDS = torch.tensor([[328, 374, 434, 282, 520]])


def _load(path: Path) -> Any:
    """The transformers model of `path` in float32, after a check that its tensors are exactly those of the files."""
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    return model.eval()


def _assert_rope_is_as_written(model: Any, path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, config["rope_theta"] ** -exponents)


@pytest.fixture(scope="module")
def bundled() -> Any:
    return _load(BUNDLED)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


class TestBundled:
    def test_directory_is_complete_and_small(self) -> None:
        names = {path.name for path in BUNDLED.iterdir()}
        assert names == {
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 8_000_000

    def test_transformers_loads_every_tensor(self, bundled: Any) -> None:
        assert type(bundled).__name__ == "Qwen3ForCausalLM"
        assert 2_500_000 < sum(parameter.numel() for parameter in bundled.parameters()) < 4_000_000
        _assert_rope_is_as_written(bundled, BUNDLED)

    def test_stored_dtype_is_the_configured_one(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype="auto")
        assert model.dtype is torch.bfloat16

    def test_shape_allows_the_promised_parallelism(self) -> None:
        config = json.loads((BUNDLED / "config.json").read_text())
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            assert config[name] % 4 == 0, name
        assert config["num_hidden_layers"] >= 3
        assert config["max_position_embeddings"] == 1024

    @pytest.mark.parametrize("prompt", SAMPLE_PROMPTS)
    def test_greedy_continuation_is_readable(self, bundled: Any, tokenizer: Tokenizer, prompt: str) -> None:
        known = {word for text in corpus.documents() for word in re.findall(r"[a-z]+", text.lower())}
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = bundled.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(out.tolist())
        words = re.findall(r"[a-z]+", text.lower())
        assert len(words) >= 20, text
        assert sum(word in known for word in words) / len(words) > 0.95, text
        # A model that is stuck repeats a phrase.
        assert len(set(words)) / len(words) > 0.4, text

    def test_a_finished_section_ends_the_text(self, bundled: Any, tokenizer: Tokenizer) -> None:
        section = next(text for text in corpus.documents() if text.startswith("The pass statement"))
        ids = torch.tensor([tokenizer.encode(section).ids])
        following = bundled(ids).logits[0, -1].softmax(-1)
        assert following[tokenizer.token_to_id(corpus.END_OF_TEXT)] > 0.5

    def test_late_positions_were_trained(self, bundled: Any, tokenizer: Tokenizer) -> None:
        longest = max(corpus.documents(), key=len)
        ids = torch.tensor([tokenizer.encode(longest).ids[:1024]])
        losses = torch.nn.functional.cross_entropy(bundled(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        assert losses[768:].mean() < losses[:256].mean() + 1.0


class TestTokenizer:
    def test_transformers_agrees(self, tokenizer: Tokenizer) -> None:
        auto = AutoTokenizer.from_pretrained(BUNDLED)
        assert (
            len(auto)
            == tokenizer.get_vocab_size()
            == json.loads((BUNDLED / "config.json").read_text())["vocab_size"]
        )
        assert auto.eos_token == auto.pad_token == corpus.END_OF_TEXT
        assert auto.eos_token_id == tokenizer.token_to_id(corpus.END_OF_TEXT)
        assert auto.model_max_length == 1024
        for text in (
            "The with statement",
            " leading space , and 'quotes'",
            "tab\tnewline\n\n中文 🙂",
            corpus.END_OF_TEXT,
        ):
            ids = tokenizer.encode(text).ids
            assert auto(text).input_ids == ids
            assert auto.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False) == text

    @given(text=st.text())
    @settings(deadline=None)
    def test_round_trips_any_text(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


class TestRandom:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_transformers_loads_every_tensor(self, preset: str, tmp_path: Path) -> None:
        shape = PRESETS[preset]
        model = _load(make_random_checkpoint(tmp_path, **shape))
        assert type(model).__name__ == shape.get("architecture", "Qwen3ForCausalLM")
        _assert_rope_is_as_written(model, tmp_path)
        assert AutoTokenizer.from_pretrained(tmp_path).eos_token == corpus.END_OF_TEXT

    @pytest.mark.parametrize("preset", PRESETS)
    def test_greedy_choice_is_clear_and_not_a_loop(self, preset: str, tmp_path: Path) -> None:
        model = _load(make_random_checkpoint(tmp_path, **PRESETS[preset]))
        out = model.generate(PROMPT_IDS, max_new_tokens=48, do_sample=False, eos_token_id=None)
        new = out[0, PROMPT_IDS.shape[1] :]
        assert len(set(new.tolist())) > 24
        best, second = model(out).logits[0].topk(2, dim=-1).values.unbind(-1)
        # Float32 sums in another order move a logit by about 1e-5.
        assert (best - second).min() > 1e-4

    def test_shards_hold_the_same_weights(self, tmp_path: Path) -> None:
        whole = make_random_checkpoint(tmp_path / "whole", **PRESETS["qwen3-gqa2"])
        parts = make_random_checkpoint(tmp_path / "parts", **PRESETS["qwen3-gqa2"], shards=3)
        assert len(list(parts.glob("model-*-of-00003.safetensors"))) == 3
        assert not (parts / "model.safetensors").exists()
        expected = _load(whole).state_dict()
        found = _load(parts).state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    def test_rewriting_leaves_no_stale_weights(self, tmp_path: Path) -> None:
        make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa1"], shards=3)
        make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa1"], shards=2)
        assert len(list(tmp_path.glob("model-*.safetensors"))) == 2
        make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa1"])
        assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]

    def test_bytes_depend_on_the_seed_only(self, tmp_path: Path) -> None:
        first, again, other = (
            (
                make_random_checkpoint(tmp_path / name, **PRESETS["llama-gqa1"], seed=seed)
                / "model.safetensors"
            ).read_bytes()
            for name, seed in (("first", 1), ("again", 1), ("other", 2))
        )
        assert first == again != other

    def test_dtype(self, tmp_path: Path) -> None:
        path = make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa1"], dtype="bfloat16")
        assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"architecture": "GPT2LMHeadModel"}, "GPT2LMHeadModel"),
            ({"dtype": "int8"}, "int8"),
            ({"num_key_value_heads": 3}, "3 key/value heads"),
            ({"num_attention_heads": 12}, "give head_dim"),
            ({"head_dim": 15}, "odd"),
            ({"vocab_size": 100}, "below the tokenizer's"),
            ({"shards": 0}, "shards"),
        ],
    )
    def test_impossible_shapes_are_refused(
        self, change: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make_random_checkpoint(tmp_path, **{**PRESETS["qwen3-gqa1"], **change})

    def test_command_line(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "minivllm.assets.make_checkpoint", "random", str(tmp_path)]
        subprocess.run(
            [*command, "--preset", "qwen3-gqa2", "--num-hidden-layers", "2"], check=True, timeout=60
        )
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["num_hidden_layers"], config["num_attention_heads"]) == (2, 8)

    def test_command_line_names_what_is_missing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["random", str(tmp_path), "--hidden-size", "64"])
        assert "--num-attention-heads" in capsys.readouterr().err


class TestTraining:
    def test_the_training_model_is_a_qwen3(self, tmp_path: Path) -> None:
        reference = _load(make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa2"]))
        model = training.TrainingQwen3(json.loads((tmp_path / "config.json").read_text()))
        weights = reference.state_dict()
        weights.pop("lm_head.weight")
        model.load_state_dict(weights)
        torch.testing.assert_close(model(PROMPT_IDS), reference(PROMPT_IDS).logits, rtol=1e-4, atol=1e-4)

    def test_same_options_give_same_weights(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        threads = torch.get_num_threads()
        config = json.loads(
            (make_random_checkpoint(tmp_path, **PRESETS["qwen3-gqa1"]) / "config.json").read_text()
        )
        texts = [f"Sentence {number} is followed. By another one.\n\nAnd a paragraph." for number in range(8)]
        options = training.TrainingOptions(steps=6, seed=3, warmup_steps=1, save_every=2)
        saved: list[float] = []
        try:
            runs = [
                training.train(
                    config,
                    tokenizer,
                    texts,
                    texts[:1],
                    options,
                    save=lambda model: saved.append(training.mean_loss(model, texts, tokenizer)),
                    log_path=tmp_path / "train.log",
                )
                for _ in range(2)
            ]
        finally:
            torch.set_num_threads(threads)
        first, second = (model.state_dict() for model, *_ in runs)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert len(saved) == 2 * 3
        assert saved[2] < saved[0]

    def test_corpus_has_no_markup_left_and_no_repeats(self) -> None:
        texts = corpus.documents()
        assert sum(map(len, texts)) > 200_000
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert "::=" not in text
            assert not re.search(r"^[=*~^-]{4,}$|^\+[-=]+\+|^\| ", text, re.MULTILINE)
