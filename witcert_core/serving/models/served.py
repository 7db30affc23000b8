"""The model that a server is about to load, as its engine describes it, and what is refused of it in every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from witcert_core.policy.model import Policy
from witcert_core.quantizers.conformance import check_quantizer
from witcert_core.serving.models.attention import ModelAttention, describe
from witcert_core.serving.models.files import declared_cache
from witcert_core.serving.models.kinds import KINDS, NO_CACHE
from witcert_core.serving.refusals import Refusal, refuse

HEAD_DIMS = range(16, 513, 16)
LATENT_DIMS = range(16, 1025, 16)
"""Of latent and rotated channels together: the rounding of norms is bounded for so many."""


@dataclass(frozen=True)
class ServedModel(ABC):
    """A model under a policy. config: the engine's `ModelConfig`; device: what it will run on, e.g. "cpu";
    kv_cache_dtype: as the server was given it."""

    config: Any
    policy: Policy
    device: str
    kv_cache_dtype: str = field(default="auto", kw_only=True)

    @property
    def name(self) -> str:
        """What messages call it: its architecture."""
        return str((getattr(self.config.hf_config, "architectures", None) or ["this model"])[0])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.config.dtype
        return found

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where its files are, if they are here."""

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Channels of its keys and of its values (of latents, which are keys and values at once, of a row), each width
        once."""
        every = {width for layer in self.attention.layers for width in (layer.head_dim, layer.v_head_dim)}
        return (self.attention.layers[0].head_dim,) if self.attention.latent_dim else tuple(sorted(every))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that cache keys and values, of the whole model."""
        return tuple(layer.index for layer in self.attention.layers)

    @property
    @abstractmethod
    def num_qo_heads(self) -> int:
        """Query heads of the whole model."""

    @cached_property
    def attention(self) -> ModelAttention:
        """Raises UnsupportedError for a cache that cannot be described."""
        return describe(self.config.hf_config, self.name, self.config.hf_text_config)

    @property
    def declared_cache(self) -> str:
        """What its checkpoint says of a quantized cache, as messages say it; '' where it says nothing."""
        return declared_cache(self.config.hf_config, self.folder)

    @property
    def kinds(self) -> frozenset[str]:
        return self.attention.kinds

    def count(self, kind: str) -> str:
        return self.attention.count(kind)


KIND_ROWS: tuple[Refusal[ServedModel], ...] = (
    *(KINDS[kind] for kind in NO_CACHE),
    Refusal(
        "models that name their attention layers or heads in a way that is not understood "
        "(`witcert_core/serving/models/names.py`)",
        "what their cache holds is not known",
        "please report the model",
    ),
    *(KINDS[kind] for kind in ("shared", "chunked")),
    *(KINDS[kind] for kind in ("diffusion", "bidirectional", "alibi")),
)
QUANTIZED: Refusal[ServedModel] = Refusal(
    "a checkpoint that declares a quantized cache (`kv_cache_quant_algo` of ModelOpt, `kv_cache_scheme` of "
    "compressed-tensors), with `--kv-cache-dtype auto` and without `quantizer.name: engine`",
    "the engine would take that up, and quantize behind the policy's quantizer",
    "use `--kv-cache-dtype bfloat16` under a model of that dtype, or name the cache that is declared and set "
    "`quantizer.name` to 'engine'",
    lambda model: (
        not model.policy.meters_engine
        and model.kv_cache_dtype == "auto"
        and bool(model.declared_cache)
        and f"{model.name} declares a quantized cache ({model.declared_cache}), with --kv-cache-dtype auto"
    ),
)
_LATENT = "multi-head latent attention (MLA)"


def _latent(what: str, why: str, instead: str, found: Callable[[ServedModel], object]) -> Refusal[ServedModel]:
    """Something of a policy or model that is refused over a latent cache; what: as the page and the message say it."""
    return Refusal(
        f"{what} with {_LATENT}",
        why,
        instead,
        lambda model: bool(model.attention.latent_dim and found(model)) and f"{model.name} uses {_LATENT}, with {what}",
    )


LATENT_ROWS: tuple[Refusal[ServedModel], ...] = (
    _latent(
        "a quantizer of keys before RoPE",
        "they are not had back from a latent cache",
        "use a quantizer of keys after RoPE",
        lambda model: model.policy.resolved_quantizer.space == "pre_rope",
    ),
    _latent(
        "`quantizer.k` and `quantizer.v`",
        "a value is a part of its key there, and is quantized as one",
        "name one quantizer for both",
        lambda model: model.policy.resolved_quantizer.of("v") is not model.policy.resolved_quantizer,
    ),
    _latent(
        "`int8_dither_bypass`",
        "outliers are kept of keys of heads",
        "use `int8_dither` or `int8_dither_w`",
        lambda model: model.policy.resolved_quantizer.bypass_pairs > 0,
    ),
    _latent(
        "`quantizer.name: engine`",
        "what the engine's kernels read of their own quantized latents is not known yet",
        "name a quantizer of the policy's",
        lambda model: model.policy.meters_engine,
    ),
    _latent(
        "two attention layers in one (LongCat-Flash)",
        "they are not told apart",
        "metered are models with one",
        lambda model: model.name.startswith("LongcatFlash"),
    ),
    _latent(
        f"rows that are not a multiple of {LATENT_DIMS.step} channels up to {LATENT_DIMS[-1]}",
        "the rounding of norms is bounded for so many",
        "metered are latent and rotated channels of these sizes",
        lambda model: model.attention.layers[0].head_dim not in LATENT_DIMS,
    ),
)
"""Over a cache of latents, which everything else takes as keys of one head whose values are a part of them."""


def _odd_width(model: ServedModel) -> str | bool:
    odd = [width for width in model.head_dims if width not in HEAD_DIMS]
    return not model.attention.latent_dim and bool(odd) and f"{model.name} has heads of {odd[0]} channels"


SIZE_ROWS: tuple[Refusal[ServedModel], ...] = (
    Refusal(
        "float32 models on a GPU",
        "the engine multiplies in TF32 there, whose rounding no radius covers",
        "use `--dtype bfloat16` or `float16`",
        lambda model: (
            model.device != "cpu" and model.dtype == torch.float32 and f"{model.name} in float32 on {model.device!r}"
        ),
    ),
    Refusal(
        f"head sizes that are not a multiple of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}",
        "there are no radii for them",
        f"metered are multiples of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}",
        _odd_width,
    ),
)


DECLARED_ROWS: tuple[Refusal[ServedModel], ...] = (*KIND_ROWS, QUANTIZED, *LATENT_ROWS, *SIZE_ROWS)
"""What every engine refuses of a model by its files alone."""


def _outliers(model: ServedModel) -> tuple[str, int]:
    """The quantizer's name, and how many pairs of channels it keeps in 16 bit."""
    return model.policy.quantizer.name, model.policy.resolved_quantizer.bypass_pairs


def _wide_outliers(model: ServedModel) -> str | bool:
    name, pairs = _outliers(model)
    return pairs > 0 and model.dtype == torch.float32 and f"quantizer.name: {name} under a float32 model"


def _many_outliers(model: ServedModel) -> str | bool:
    name, pairs = _outliers(model)
    width = min(layer.head_dim for layer in model.attention.layers)
    most = width // 2
    said = f"quantizer.params: {name} bypasses {pairs} channel pairs of a head of {width} channels"
    return pairs > most and f"{said}, which has {most}"


OUTLIER_ROWS: tuple[Refusal[ServedModel], ...] = (
    Refusal(
        "`int8_dither_bypass` under a float32 model",
        "it keeps outlier channels in 16 bit, and the model has more",
        "use `--dtype bfloat16`",
        _wide_outliers,
    ),
    Refusal(
        "`int8_dither_bypass` with more pairs than a head has",
        "each channel can be kept once",
        "lower `quantizer.params.pairs`",
        _many_outliers,
    ),
)


def _check_widths(model: ServedModel) -> None:
    """QuantizerError for a quantizer that does not keep its contract at some width of the model's heads."""
    for width in model.head_dims:
        check_quantizer(model.policy.resolved_quantizer, width, latent_dim=model.attention.latent_dim)


def model_checks(model: ServedModel, rows: Sequence[Refusal[Any]]) -> list[tuple[str, Callable[[], Any]]]:
    """What a model is checked for, in order and by subject: a server's verdict at its start, and the doctor's.

    rows: those of the engine, with what is refused in every engine among them.
    """
    policy = model.policy
    return [
        ("model", lambda: refuse(rows, model)),
        ("outliers", lambda: refuse(OUTLIER_ROWS, model)),
        (
            "head size",
            lambda: _check_widths(model),
        ),
        ("quantizer.layers", lambda: policy.quantizer.layers_of(model.layers)),
        ("meter.layers", lambda: policy.meter.layers_of(model.layers)),
    ]


def check_served(model: ServedModel, rows: Sequence[Refusal[Any]]) -> None:
    """All of `model_checks`: raises the error of the first that refuses."""
    for _subject, check in model_checks(model, rows):
        check()
