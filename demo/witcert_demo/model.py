"""A small Llama in plain torch, whose state dict is that of Hugging Face ``LlamaForCausalLM`` name for name.

Half-split rotary embedding, grouped-query attention, RMSNorm, SwiGLU, tied embeddings, no bias.
Shapes: B batch, T tokens, E hidden size, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from witcert_demo.vocabulary import MODEL_MAX_LENGTH, VOCAB_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, under the names of Hugging Face's ``LlamaConfig``."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = MODEL_MAX_LENGTH

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; half-split rotary pairs need an even one")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )


def rotary_table(config: ModelConfig, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of positions 0..T-1; channel i and i + D/2 share a frequency."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(num_tokens).float(), 1.0 / config.rope_theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [..., T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, Hq, T, D], rotated keys and values [B, Hkv, T, D] of ``x`` [B, T, E]."""

        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:2], -1, self.config.head_dim).transpose(1, 2)

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def merge(self, attended: Tensor) -> Tensor:
        """Output projection [B, T, E] of ``attended`` [B, Hq, T, D]."""
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.project(x, cos, sin)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        return self.merge(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The part Hugging Face calls ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyLlama(nn.Module):
    """Decoder with its embedding as output head; weights start random from torch's global generator."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if "embed_tokens" in name else parameter.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std *= 0.5  # keeps the residual stream from growing with depth
            nn.init.normal_(parameter, std=std)

    def layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.model.layers]

    def hidden(self, ids: Tensor) -> Tensor:
        """Normalised last hidden states [B, T, E] of ``ids`` [B, T]."""
        cos, sin = rotary_table(self.config, ids.shape[1])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.model.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab_size] of ``hidden`` [..., E]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))
