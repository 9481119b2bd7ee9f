"""The training of the bundled checkpoint: a compact Qwen3 in torch with Hugging Face weight names, and its loop.

vLLM 0.25.1: no counterpart
Articles: –

It exists for training only. Inference uses `minivllm.model_executor.models.qwen3`, and the tests compare both
with transformers.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from minivllm.assets.corpus import end_of_text_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Sequence lengths of a training step, in turn; every step has STEP_TOKENS tokens. Half of the steps are short, so that
# many sequences start anew: a prompt has no text before it. The long ones teach the positions up to the 1024 that the
# configuration promises.
_STEP_LENGTHS = (64, 256, 64, 512, 128, 256, 64, 1024)
STEP_TOKENS = 2048

# Where windows start: at paragraphs, sentences, words; and the share of each.
_WINDOW_STARTS = (r"(?<=\n\n)(?=\S)", r"(?<=[.:] )(?=[A-Z])|(?<=\n\n)(?=[A-Z])", r"(?<=\s)(?=\S)")
_WINDOW_SHARES = (0.4, 0.4, 0.2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        query, kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, query * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(query * self.head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Model(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])


class TrainingQwen3(nn.Module):
    """A Qwen3 with tied embeddings whose `state_dict` has the names that transformers and vLLM read.

    `config` is the dictionary of config.json.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = _Model(config)
        positions = torch.arange(config["max_position_embeddings"], dtype=torch.float32)
        exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
        angles = positions[:, None] * config["rope_theta"] ** -exponents
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        residual_scale = 1 / math.sqrt(2 * config["num_hidden_layers"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5 * 0.5)
                if is_residual:
                    parameter.data.mul_(residual_scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids `[batch, length]` to logits `[batch, length, vocab_size]`."""
        cos, sin = self.cos[: token_ids.shape[1]], self.sin[: token_ids.shape[1]]
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in nats per token; both arguments are token ids `[batch, length]`."""
        return F.cross_entropy(self(token_ids).flatten(0, 1), targets.flatten())

    @torch.inference_mode()
    def continue_greedily(self, token_ids: Sequence[int], max_tokens: int, *, end: int) -> list[int]:
        """The `max_tokens` most likely next tokens, one at a time and without a cache; fewer when `end` comes."""
        ids = list(token_ids)
        while len(ids) < len(token_ids) + max_tokens:
            choice = int(self(torch.tensor([ids]))[0, -1].argmax())
            if choice == end:
                break
            ids.append(choice)
        return ids[len(token_ids) :]


@dataclass(frozen=True)
class TrainingOptions:
    """What the result depends on, besides text and shape: the same values give the same weights on one machine."""

    steps: int
    seed: int
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    corruption: float = 0.1  # share of the input tokens that are replaced by random ones
    warmup_steps: int = 100
    threads: int = 1
    save_every: int = 200


class _Batches:
    """Windows of the texts, most of which start where a paragraph or a sentence does, as prompts do."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, seed: int) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._end = end_of_text_id(tokenizer)
        self._random = random.Random(seed)
        self._lengths = [len(text) for text in texts]
        self._starts = [
            [[0, *(match.start() for match in re.finditer(pattern, text))] for pattern in _WINDOW_STARTS]
            for text in texts
        ]

    def _window(self, length: int) -> list[int]:
        (index,) = self._random.choices(range(len(self._texts)), self._lengths)
        (starts,) = self._random.choices(self._starts[index], _WINDOW_SHARES)
        start = self._random.choice(starts)
        # No token is longer than 16 characters on average, so that this never cuts a window short.
        window = [*self._tokenizer.encode(self._texts[index][start : start + 16 * length]).ids, self._end]
        while len(window) < length:
            window += [*self._tokenizer.encode(self._random.choice(self._texts)).ids, self._end]
        return window[:length]

    def next(self, length: int) -> Tensor:
        """Token ids `[STEP_TOKENS // length, length + 1]`."""
        return torch.tensor([self._window(length + 1) for _ in range(STEP_TOKENS // length)])


@torch.inference_mode()
def mean_loss(model: TrainingQwen3, texts: Sequence[str], tokenizer: Tokenizer) -> float:
    """Nats per token over `texts`, each from its start and cut to 1024 tokens."""
    total, count = 0.0, 0
    for encoding in tokenizer.encode_batch(list(texts)):
        ids = torch.tensor([[*encoding.ids, end_of_text_id(tokenizer)][:1025]])
        total += model.loss(ids[:, :-1], ids[:, 1:]).item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def train(
    config: dict[str, Any],
    tokenizer: Tokenizer,
    texts: Sequence[str],
    held_out: Sequence[str],
    options: TrainingOptions,
    *,
    save: Callable[[TrainingQwen3], None],
    log_path: Path,
) -> tuple[TrainingQwen3, float, float]:
    """Train from scratch; returns the float32 model, the processor minutes it took, and the mean loss of the last steps.

    `save` is called every `options.save_every` steps, and `log_path` gets one line for each progress report, from
    time to time with the loss on the texts of `held_out`.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = TrainingQwen3(config)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    batches = _Batches(texts, tokenizer, options.seed)
    console = Console()
    progress = Progress(
        TextColumn("[bold]training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=120,
    )
    started = window_start = time.monotonic()
    processor_started = time.process_time()
    window_losses: list[float] = []
    mean = math.nan
    with progress, log_path.open("w", encoding="utf-8") as log:
        task = progress.add_task("", total=options.steps, loss=math.nan, rate=0.0)
        for step in range(options.steps):
            warm = min(1.0, (step + 1) / options.warmup_steps)
            decay = 0.5 * (1 + math.cos(math.pi * step / options.steps))
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * warm * (0.02 + 0.98 * decay)
            ids = batches.next(_STEP_LENGTHS[step % len(_STEP_LENGTHS)])
            # A prompt of the reader's leads off the text that the model knows. One that has learnt to predict from
            # imperfect text finds its way back to a sentence; one that has not writes nonsense.
            corrupt = torch.rand(ids.shape) < options.corruption
            seen = torch.where(corrupt, torch.randint(config["vocab_size"], ids.shape), ids)
            loss = model.loss(seen[:, :-1], ids[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            window_losses.append(loss.item())
            progress.update(task, advance=1)
            done = step + 1
            saves = done % options.save_every == 0
            if saves or done % 20 == 0 or done == options.steps:
                now = time.monotonic()
                mean = sum(window_losses) / len(window_losses)
                rate = len(window_losses) * STEP_TOKENS / (now - window_start)
                eta = (now - started) / done * (options.steps - done)
                progress.update(task, loss=mean, rate=rate)
                line = f"step {done}/{options.steps} loss {mean:.4f} {rate:.0f} tok/s eta {eta / 60:.1f} min"
                if saves:
                    line += f" held-out {mean_loss(model, held_out, tokenizer):.4f}"
                    save(model)
                log.write(line + "\n")
                log.flush()
                if not console.is_terminal:
                    console.print(line, highlight=False)
                window_start, window_losses = time.monotonic(), []
    return model, (time.process_time() - processor_started) / 60, mean
