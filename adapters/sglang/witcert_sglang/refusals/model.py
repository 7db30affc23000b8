"""What a model is refused for before it is loaded, by its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from witcert_core.serving import (
    DECLARED_ROWS,
    KIND_ROWS,
    KINDS,
    LATENT_ROWS,
    QUANTIZED,
    SIZE_ROWS,
    Refusal,
    ServedModel,
)
from witcert_sglang.windows import WINDOW_POOL_UNREAD

KEEP_STATES = ("falconh1", "granitemoehybrid", "nemotronh", "lfm2", "qwen3next", "qwen35", "kimilinear")
"""Families for whose recurrent layers SGLang keeps states, in letters and digits of their architectures alone."""


@dataclass(frozen=True)
class SglangModel(ServedModel):
    """config: SGLang's `ModelConfig`. backend: as the server was given it."""

    backend: str

    @property
    def folder(self) -> Path:
        return Path(self.config.model_path)

    @property
    def num_qo_heads(self) -> int:
        return int(self.config.num_attention_heads)


def _unknown_states(model: ServedModel) -> str | bool:
    """Layers without keys and values in a model that is none of those for which SGLang keeps recurrent states."""
    family = "".join(filter(str.isalnum, model.name)).lower()
    odd = {"none", "state"} & model.kinds and not any(name in family for name in KEEP_STATES)
    return bool(odd) and f"{model.name} has layers without a KV cache{model.count('none')}"


def _narrow_pool(model: SglangModel) -> str | bool:
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        model.kv_cache_dtype in ("bf16", "bfloat16")
        and model.dtype != torch.bfloat16
        and f"--kv-cache-dtype {model.kv_cache_dtype} under a {dtype} model"
    )


def _unequal_widths(model: SglangModel) -> str | bool:
    packed = model.policy.quantizer.storage == "packed"
    return packed and "widths" in model.kinds and f"{model.name} has keys and values of different widths"


def _ignored_cap(model: SglangModel) -> str | bool:
    cap = getattr(model.config.hf_text_config, "attn_logit_softcapping", None)
    return (
        bool(cap)
        and model.backend == "torch_native"
        and f"{model.name} caps its logits (attn_logit_softcapping {cap}) under torch_native"
    )


def _without_class(model: SglangModel) -> str:
    """What SGLang says of an architecture of which it has no class, nor Transformers one that it runs."""
    from sglang.srt.model_loader.utils import get_model_architecture

    try:
        get_model_architecture(model.config)
    except ValueError as error:
        said = " ".join(str(error).split()).partition(" Supported architectures:")[0]
        return f"{model.name} cannot be served by this SGLang ({said})"
    return ""


UNKNOWN_STATES: Refusal[ServedModel] = Refusal(
    "layers without a KV cache, other than recurrent ones in a `HybridLinearKVPool` (Falcon-H1, Granite 4, Nemotron-H, "
    "LFM2, Qwen3-Next and 3.5, Kimi Linear)",
    "what these keep is not followed",
    "metered are layers that cache keys and values of their own, beside such recurrent ones",
    _unknown_states,
)
ARCH_ROWS: tuple[Refusal[SglangModel], ...] = (
    KINDS["state-space"].where(
        lambda model: model.config.attention_arch.name == "SSM" and f"{model.name} has no attention",
    ),
    *KIND_ROWS,
    *LATENT_ROWS,
    UNKNOWN_STATES,
    KINDS["mla"].where(
        lambda model: (
            (model.config.attention_arch.name == "MLA") != ("mla" in model.kinds)
            and f"{model.name} uses multi-head latent attention (MLA) by its configuration or in SGLang, not by both"
        ),
    ),
)
"""What a model's kind is refused for, whatever the options."""
LATENT_BACKENDS = ("triton", "torch_native")
LATENT_CHUNK_ROWS: tuple[Refusal[SglangModel], ...] = (
    Refusal(
        f"multi-head latent attention (MLA) with other attention backends than {' and '.join(LATENT_BACKENDS)}",
        "they multiply the latents of a prefix out before a chunk attends to it, and what that rounds is in no radius",
        "use `--attention-backend triton`",
        lambda model: (
            bool(model.attention.latent_dim)
            and model.backend not in LATENT_BACKENDS
            and f"{model.name} uses multi-head latent attention (MLA), with {model.backend}"
        ),
    ),
    Refusal(
        "multi-head latent attention (MLA) with `quantizer.storage: packed`",
        "SGLang's pool of latents has no room for codes and scales",
        "set `quantizer.storage` to 'simulated'",
        lambda model: (
            bool(model.attention.latent_dim)
            and model.policy.quantizer.storage == "packed"
            and f"{model.name} uses multi-head latent attention (MLA), with quantizer.storage: packed"
        ),
    ),
    Refusal(
        "multi-head latent attention (MLA) under `prefill_reads: stored`",
        "a first chunk attends to keys and values that are multiplied out of its own exact latents",
        "set `prefill_reads` to 'chunk_exact'",
        lambda model: (
            bool(model.attention.latent_dim)
            and model.policy.prefill_reads == "stored"
            and f"{model.name} uses multi-head latent attention (MLA), under prefill_reads: stored"
        ),
    ),
)
MODEL_ROWS: tuple[Refusal[SglangModel], ...] = (
    QUANTIZED,
    WINDOW_POOL_UNREAD.where(
        lambda model: (
            model.config.is_hybrid_swa
            and model.backend == "torch_native"
            and f"{model.name} keeps layers with a window in a pool of their own"
        )
    ),
    Refusal(
        "`--kv-cache-dtype bf16` under a model of another dtype without `quantizer.name: engine`",
        "it would round before the quantizer does",
        "use `--kv-cache-dtype auto` or `--dtype bfloat16`",
        _narrow_pool,
    ),
    *LATENT_CHUNK_ROWS,
    *SIZE_ROWS,
    Refusal(
        "keys and values of different widths with `quantizer.storage: packed`",
        "SGLang's pool asks for the room of one width",
        "set `quantizer.storage` to 'simulated'",
        _unequal_widths,
    ),
    Refusal(
        "models that do not generate",
        "their passes sample nothing, so no request would be reported",
        "metered are generating models",
        lambda model: not getattr(model.config, "is_generation", True) and f"{model.name} does not generate text",
    ),
    KINDS["encoder-decoder"].where(
        lambda model: (
            getattr(model.config, "is_encoder_decoder", False) and f"{model.name} is an encoder-decoder model"
        ),
    ),
    Refusal(
        "logit soft-capping with `torch_native`",
        "SGLang's torch_native backend ignores the cap, so its weights are not the model's",
        "use `--attention-backend triton`",
        _ignored_cap,
    ),
)
NO_CLASS: Refusal[SglangModel] = Refusal(
    "architectures of which SGLang has no class",
    "nothing could serve it",
    "metered are models that SGLang serves",
    _without_class,
)
ROWS = (*ARCH_ROWS, *MODEL_ROWS, NO_CLASS)
DECLARED = (*DECLARED_ROWS, UNKNOWN_STATES)
"""What is refused by a model's files alone, before SGLang reads them."""
