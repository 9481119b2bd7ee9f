"""Makes checkpoints: the bundled tiny Qwen3, trained from scratch, and random ones of any shape for tests.

vLLM 0.25.1: no counterpart
Articles: –

    python -m minivllm.assets.make_checkpoint train DIR
    python -m minivllm.assets.make_checkpoint random DIR --preset qwen3-1m
    python -m minivllm.assets.make_checkpoint random DIR --preset qwen3-gqa2 --dtype bfloat16 --shards 2

Both write a normal Hugging Face directory that transformers, vLLM and minivllm load.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.assets import corpus, training
from minivllm.assets.checkpoint_files import (
    DTYPES,
    MODEL_TYPES,
    make_config,
    write_json,
    write_tokenizer,
    write_weights,
)
from minivllm.assets.random_checkpoint import PRESETS, make_random_checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PRESETS", "make_random_checkpoint", "train_bundled_checkpoint"]

VOCAB_SIZE = 2048
HELD_OUT = 0.05
SAMPLE_PROMPTS = (
    "The with statement is used",
    "A function definition",
    "When an exception is raised,",
    "The value of a variable",
)

_README = """\
---
license: apache-2.0
language: en
---

# tiny-qwen3

A Qwen3 language model of {parameters:,} parameters ({layers} layers, hidden size {hidden_size}, {heads} query and
{kv_heads} key/value heads of size {head_dim}, vocabulary {vocab_size}, tied embeddings, bfloat16). It exists so that
minivllm has something real to run: it writes readable sentences in the style of the Python language reference, and
knows nothing else. Much of its training text it knows by heart.

## How it was trained

    python -m minivllm.assets.make_checkpoint train DIR --steps {steps} --seed {seed} --threads {threads}

| | |
|---|---|
| text | the Python {python} language reference as shipped in `pydoc_data.topics`: {sections} sections, {characters:,} characters after cleaning; {held_out_sections} sections held out |
| tokenizer | byte-level BPE trained on the same text, held-out sections included; `<|endoftext|>` ends a text |
| steps | {steps} of 2048 tokens, {epochs:.0f} times through the {train_tokens:,} training tokens, in {minutes:.0f} processor minutes |
| optimizer | AdamW, learning rate {learning_rate:g} with {warmup_steps} warm-up steps and cosine decay, weight decay {weight_decay:g}, {corruption:.0%} of the input tokens replaced by random ones, float32 |
| machine | {machine}, {threads} thread(s), torch {torch} |
| loss of the last steps, with replaced tokens | {last_loss:.3f} nats per token |
| loss of the bfloat16 weights on the training text | {train_loss:.3f} |
| loss of the bfloat16 weights on the held-out sections | {held_out_loss:.3f} |

The last line shows what it is: a model this small, trained this often on a text this short, remembers more than it
generalises.

## Greedy continuations

{samples}
"""


def _sample(model: training.TrainingQwen3, tokenizer: Tokenizer, prompt: str) -> str:
    ids = tokenizer.encode(prompt).ids
    new = model.continue_greedily(ids, 60, end=corpus.end_of_text_id(tokenizer))
    text = tokenizer.decode(new).rstrip().replace("\n", "\n> ")
    return f"> **{prompt}**{text}"


def train_bundled_checkpoint(
    path: str | os.PathLike[str], *, log_path: Path, machine: str, steps: int, seed: int, threads: int
) -> Path:
    """Train the bundled model from scratch in float32, write it to `path` in bfloat16, and return the directory.

    `machine` is named in the README. A usable checkpoint is written every 200 steps, so that an interrupted run
    leaves one; the README with the figures comes last.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    texts = corpus.documents()
    train_texts, held_out_texts = corpus.split(texts, held_out=HELD_OUT, seed=seed)
    tokenizer = corpus.train_tokenizer(texts, VOCAB_SIZE)
    config = make_config(
        architecture="Qwen3ForCausalLM",
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        dtype="bfloat16",
        end_of_text=corpus.end_of_text_id(tokenizer),
    )
    write_tokenizer(directory, tokenizer, config["max_position_embeddings"])
    write_json(directory / "config.json", config)

    def save(model: training.TrainingQwen3) -> None:
        weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        write_weights(directory, weights, shards=1)

    options = training.TrainingOptions(steps=steps, seed=seed, threads=threads)
    model, minutes, last_loss = training.train(
        config, tokenizer, train_texts, held_out_texts, options, save=save, log_path=log_path
    )
    save(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    train_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(train_texts))
    readme = _README.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        sections=len(texts),
        characters=sum(map(len, texts)),
        held_out_sections=len(held_out_texts),
        train_tokens=train_tokens,
        epochs=steps * training.STEP_TOKENS / train_tokens,
        minutes=minutes,
        machine=machine,
        python=platform.python_version(),
        torch=torch.__version__,
        last_loss=last_loss,
        train_loss=training.mean_loss(model, train_texts, tokenizer),
        held_out_loss=training.mean_loss(model, held_out_texts, tokenizer),
        samples="\n\n".join(_sample(model, tokenizer, prompt) for prompt in SAMPLE_PROMPTS),
        **{key: config[key] for key in ("hidden_size", "head_dim", "vocab_size")},
        **vars(options),
    )
    (directory / "README.md").write_text(readme, encoding="utf-8")
    return directory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minivllm.assets.make_checkpoint", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", help="train the bundled model from scratch (about 20 minutes of one core)"
    )
    train.add_argument("directory", type=Path)
    train.add_argument("--steps", type=int, default=1600, help="steps of 2048 tokens (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    train.add_argument("--machine", default=platform.machine(), help="what the README calls this machine")
    train.add_argument(
        "--log", type=Path, default=Path("train.log"), help="progress log (default: %(default)s)"
    )

    rand = commands.add_parser(
        "random",
        help="write random weights",
        description="Random weights. A shape is a preset, or all of the size options, or a preset changed by some.",
        argument_default=argparse.SUPPRESS,
    )
    rand.add_argument("directory", type=Path)
    rand.add_argument("--preset", choices=PRESETS)
    rand.add_argument("--architecture", choices=MODEL_TYPES)
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    for name in (*sizes, "head_dim", "vocab_size", "max_position_embeddings", "seed", "shards"):
        rand.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("rope_theta", "rms_norm_eps"):
        rand.add_argument(f"--{name.replace('_', '-')}", type=float)
    for name in ("tie_word_embeddings", "attention_bias"):
        rand.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction)
    rand.add_argument("--dtype", choices=DTYPES)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """The command line; `arguments` defaults to the process's."""
    parser = _parser()
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    directory = options.pop("directory")
    if options.pop("command") == "train":
        options["log_path"] = options.pop("log")
        train_bundled_checkpoint(directory, **options)
    else:
        shape = {"tie_word_embeddings": True, **PRESETS.get(options.pop("preset", ""), {}), **options}
        required = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
        if missing := [name for name in required if name not in shape]:
            parser.error(f"without --preset, give also --{', --'.join(missing).replace('_', '-')}")
        try:
            make_random_checkpoint(directory, **shape)
        except ValueError as error:
            parser.error(str(error))
    print(directory)


if __name__ == "__main__":
    main()
