"""Evaluation without an engine: decode steps read a quantized cache, prompt rows their own exact keys.

Every answer row attends to ``fake_quantize`` of all keys and values before it and of its own, as a decode
step does that first writes its token and then reads the cache. The answer is fed in (teacher forcing): greedy
decoding produces it exactly when every one of its tokens is the most likely one given those before it, so
this scores what greedy decoding would, in one pass.
Shapes: B batch, P prompt tokens, T all tokens fed, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from witcert_demo.checkpoint import load_model
from witcert_demo.model import Attention, TinyLlama, rotary_table
from witcert_demo.score import accuracy, exact_match
from witcert_demo.tasks import make_samples


class FakeQuantize(Protocol):
    """What a cache gives back for post-rotary keys or for values ``x`` [N, Hkv, D] float32, same shape."""

    def __call__(self, x: Tensor, /, *, kind: Literal["k", "v"], layer: int, positions: Tensor) -> Tensor: ...


_BATCH = 16


@dataclass(frozen=True)
class Evaluation:
    """Outcome over ``count`` samples.

    ``damaged_share`` is the share of cells (layer, query head, answer row) whose total variation between
    exact and quantized attention exceeds ``tau``; ``max_abs_key`` the largest |K| written, rotary applied.
    """

    task: str
    count: int
    accuracy: float
    tau: float
    damaged_share: float
    max_abs_key: float


@dataclass(frozen=True)
class CachedPass:
    """``logits`` [B, T, V]; ``total_variation`` [layers, B, Hq, T − P] of the answer rows."""

    logits: Tensor
    total_variation: Tensor
    max_abs_key: float


def _through_cache(x: Tensor, kind: Literal["k", "v"], layer: int, fake_quantize: FakeQuantize | None) -> Tensor:
    """``x`` [B, Hkv, T, D] as the cache gives it back."""
    if fake_quantize is None:
        return x
    batch, num_kv_heads, num_tokens, head_dim = x.shape
    rows = x.transpose(1, 2).reshape(batch * num_tokens, num_kv_heads, head_dim)
    positions = torch.arange(num_tokens).repeat(batch)
    read = fake_quantize(rows, kind=kind, layer=layer, positions=positions)
    if read.shape != rows.shape or read.dtype != rows.dtype:
        raise ValueError(
            f"fake_quantize returned {tuple(read.shape)} {read.dtype} for {tuple(rows.shape)} {rows.dtype}; "
            "it must keep shape and dtype"
        )
    return read.view(batch, num_tokens, num_kv_heads, head_dim).transpose(1, 2)


def _answer_weights(query: Tensor, key: Tensor, first_row: int) -> Tensor:
    """Attention weights [B, Hkv, G, T − P, T] of the rows from ``first_row`` on, over visible keys."""
    num_rows, num_tokens = query.shape[-2], key.shape[-2]
    visible = torch.ones(num_rows, num_tokens, dtype=torch.bool).tril(first_row)
    logits = torch.einsum("bhgrd,bhtd->bhgrt", query, key) * key.shape[-1] ** -0.5
    weights: Tensor = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights


def _attend(
    attention: Attention,
    layer: int,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    num_prompt: int,
    fake_quantize: FakeQuantize | None,
) -> tuple[Tensor, Tensor, float]:
    """Output [B, T, E], total variation [B, Hq, T − P] and max |K| of one layer."""
    query, key, value = attention.project(x, *rotary)
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    prompt = F.scaled_dot_product_attention(
        query[:, :, :num_prompt],
        key[:, :, :num_prompt].repeat_interleave(group, dim=1),
        value[:, :, :num_prompt].repeat_interleave(group, dim=1),
        is_causal=True,
    )
    stored_key = _through_cache(key, "k", layer, fake_quantize)
    stored_value = _through_cache(value, "v", layer, fake_quantize)
    rows = query[:, :, num_prompt:]
    rows = rows.reshape(rows.shape[0], num_kv_heads, group, *rows.shape[2:])
    exact = _answer_weights(rows, key, num_prompt)
    stored = _answer_weights(rows, stored_key, num_prompt)
    answer = torch.einsum("bhgrt,bhtd->bhgrd", stored, stored_value).flatten(1, 2)
    # A cache entry that overflowed leaves NaN weights; they count as fully damaged.
    variation = (0.5 * (exact - stored).abs().sum(dim=-1)).nan_to_num(nan=1.0).flatten(1, 2)
    return attention.merge(torch.cat([prompt, answer], dim=2)), variation, key.abs().max().item()


@torch.no_grad()
def forward_cached(model: TinyLlama, ids: Tensor, num_prompt: int, fake_quantize: FakeQuantize | None) -> CachedPass:
    """One pass over ``ids`` [B, T] in which rows from ``num_prompt`` on read the cache."""
    rotary = rotary_table(model.config, ids.shape[1])
    x = cast(Tensor, model.model.embed_tokens(ids))
    variations: list[Tensor] = []
    max_abs_key = 0.0
    for index, layer in enumerate(model.layers()):
        attended, variation, largest = _attend(
            layer.self_attn, index, layer.input_layernorm(x), rotary, num_prompt, fake_quantize
        )
        x = x + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        variations.append(variation)
        max_abs_key = max(max_abs_key, largest)
    return CachedPass(model.logits(model.model.norm(x)), torch.stack(variations), max_abs_key)


def evaluate_model(
    model: TinyLlama,
    fake_quantize: FakeQuantize | None,
    task: str,
    *,
    num_tokens: int = 512,
    count: int = 64,
    seed: int = 0,
    tau: float = 0.2,
) -> Evaluation:
    """Strict accuracy of ``model`` on ``count`` samples; ``fake_quantize=None`` keeps the cache exact."""
    samples = make_samples(task, num_tokens, count, seed)
    outcomes: list[bool] = []
    damaged: list[Tensor] = []
    max_abs_key = 0.0
    for first in range(0, count, _BATCH):
        part = samples[first : first + _BATCH]
        ids = torch.tensor([sample.prompt_ids + sample.answer_ids for sample in part])
        done = forward_cached(model, ids[:, :-1], num_tokens, fake_quantize)
        chosen = done.logits[:, num_tokens - 1 :].argmax(dim=-1).tolist()
        outcomes += [exact_match(sample, row) for sample, row in zip(part, chosen, strict=True)]
        damaged.append((done.total_variation > tau).flatten())
        max_abs_key = max(max_abs_key, done.max_abs_key)
    return Evaluation(
        task=task,
        count=count,
        accuracy=accuracy(outcomes),
        tau=tau,
        damaged_share=torch.cat(damaged).float().mean().item(),
        max_abs_key=max_abs_key,
    )


def evaluate(
    model_dir: Path,
    fake_quantize: FakeQuantize | None,
    task: str,
    *,
    num_tokens: int = 512,
    count: int = 64,
    seed: int = 0,
    tau: float = 0.2,
) -> Evaluation:
    """``evaluate_model`` of a checkpoint directory."""
    model = load_model(model_dir)
    return evaluate_model(model, fake_quantize, task, num_tokens=num_tokens, count=count, seed=seed, tau=tau)
