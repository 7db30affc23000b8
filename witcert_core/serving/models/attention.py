"""A model's attention as its configuration describes it: which layers cache keys and values, and of what shape.

One description for all that must be known before a model is loaded: `witcert capacity` counts its bytes, and `witcert
doctor` and the adapters' start-up checks refuse by it. It reads plain mappings (a `config.json`) and configuration
objects (those of Transformers, of SGLang and of vLLM), and imports none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.models.fields import Fields, text_part
from witcert_core.serving.models.kinds import KINDS, NO_CACHE
from witcert_core.serving.models.layers import LayerKind, layer_kinds
from witcert_core.serving.models.names import check_names
from witcert_core.serving.refusals import refuse

_ENCODER_DECODERS = frozenset(
    {
        "t5",
        "mt5",
        "umt5",
        "longt5",
        "bart",
        "mbart",
        "marian",
        "pegasus",
        "whisper",
        "m2m_100",
        "blenderbot",
        "fsmt",
        "led",
    }
)
_PREFIX_MODELS = ("hrm_text",)
"""Model types whose prompts attend both ways, though their engines' layers say that they decode."""
_DIFFUSERS = ("Diffusion", "LLaDA", "Dream", "SDAR")
_STATES = ("state_size", "ssm_state_size", "ssm_cfg", "conv_kernel", "time_step_rank", "attention_hidden_size")


@dataclass(frozen=True)
class CacheLayer:
    """One layer that caches keys and values of its own; window: the tokens it looks back over, None for all."""

    index: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class ModelAttention:
    """A model's attention. name: what messages call it; kinds: the keys of `KINDS` that hold of it.

    num_hidden_layers: all layers; layers: those with a cache of their own. rotary_dim: channels the rotary embedding
    turns, None for all. latent_dim: leading channels of a key that are the latent of all heads, and the value; 0 of
    keys per head.
    """

    name: str
    num_hidden_layers: int
    num_qo_heads: int
    layers: tuple[CacheLayer, ...]
    kinds: frozenset[str] = frozenset()
    rotary_dim: int | None = None
    latent_dim: int = 0

    def rotary(self, head_dim: int) -> RotarySpec:
        """What RoPE turns of a key of `head_dim` channels."""
        return RotarySpec(head_dim, rotary_dim=self.rotary_dim, latent_dim=self.latent_dim)

    @property
    def windows(self) -> tuple[CacheLayer, ...]:
        """The layers with a window or chunks."""
        return tuple(layer for layer in self.layers if layer.window is not None)

    @property
    def shapes(self) -> dict[tuple[int, int, int], int]:
        """(KV heads, width of keys, width of values) -> how many layers have it."""
        return dict(Counter((layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in self.layers))

    def refuse(self, *kinds: str) -> None:
        """UnsupportedError for the first of `kinds` that the model has."""
        refuse([KINDS[kind] for kind in kinds], self)

    def count(self, kind: str) -> str:
        """How many layers are of that kind, and which, as messages say it; '' where it is one of the whole model."""
        if kind == "none":
            return f" ({self.num_hidden_layers - len(self.layers)} of {self.num_hidden_layers})"
        if kind in ("sliding", "chunked") and self.windows:
            longest = max(layer.window or 0 for layer in self.windows)
            return f" of {longest} tokens ({len(self.windows)} of {self.num_hidden_layers})"
        return ""


def describe(config: Any, origin: str, text: Any = None) -> ModelAttention:
    """The attention of a model.

    config: a mapping as in `config.json`, or a configuration object. text: its language part, where the caller knows
    it. origin: what messages call the model.

    Raises:
        InputError: a size is missing or impossible.
        UnsupportedError: the model caches something else than keys and values per head, or says something of its
            attention that is not understood.
    """
    part = text_part(config) if text is None else text
    if part is None:
        raise InputError(f"{origin}: its language part is empty; is this a language model's configuration?")
    fields = Fields(part, origin)
    kinds = _special(Fields(config, origin), fields)
    _refuse_without_cache(origin, kinds)
    check_names(fields.values(), origin)
    listed = fields.words("layers_block_type") or fields.words("layer_types")
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    bare = listed is not None and all(fields(name) is None for name in names)
    count = len(listed or ()) if bare else fields.first(*names)
    heads = fields.first("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads")
    per_layer = layer_kinds(fields, count)
    _refuse_without_cache(origin, {kind.kind for kind in per_layer})
    own = max(count - (fields.integer("num_kv_shared_layers", 0) or 0), 0)
    every = (fields.integer("cla_share_factor") or 1) if fields("use_cla") else 1  # neighbours that share a cache
    mixed = any(kind.kind == "sliding" for kind in per_layer)
    layers = tuple(
        _latent_layer(fields, index, kind) if "mla" in kinds else _cache_layer(fields, index, kind, mixed, heads)
        for index, kind in enumerate(per_layer[:own])
        if kind.kind != "none" and index % every == 0
    )
    if not layers:
        raise UnsupportedError(f"{origin}: has no layer with a cache of keys and values")
    found = ModelAttention(origin, count, heads, layers)
    kinds |= {kind.kind for kind in per_layer if kind.kind in ("none", "sliding", "chunked")}
    for name, has in (
        ("state", any(kind.state and kind.kind != "none" for kind in per_layer)),
        ("shared", own < count or every > 1),
        ("widths", "mla" not in kinds and any(layer.head_dim != layer.v_head_dim for layer in layers)),
    ):
        if has:
            kinds.add(name)
    if "mla" in kinds:
        latent = layers[0].v_head_dim
        return replace(found, kinds=frozenset(kinds), rotary_dim=layers[0].head_dim - latent, latent_dim=latent)
    return replace(found, kinds=frozenset(kinds), rotary_dim=_rotary_dim(fields, layers[0].head_dim))


def _refuse_without_cache(origin: str, kinds: Iterable[str]) -> None:
    """UnsupportedError for a kind of `NO_CACHE`."""
    name = f"{origin}:" if origin.endswith(".json") else origin  # after a model comes its verb
    ModelAttention(name, 0, 0, (), frozenset(kinds)).refuse(*NO_CACHE)


def _special(top: Fields, text: Fields) -> set[str]:
    """Kinds that the configuration shows as a whole."""
    model_type = text("model_type") or top("model_type") or ""
    names = top.words("architectures") or []
    encodes = top("is_encoder_decoder") or text("is_encoder_decoder") or model_type in _ENCODER_DECODERS
    heads = any(text(name) for name in ("num_attention_heads", "n_head", "n_heads"))
    sections = [part for part in (text, text.section("attn_config")) if part is not None]
    alibi = any(part("alibi") for part in sections) or model_type == "bloom"
    alibi = alibi or "alibi" in (text("position_embedding_type"), text("position_encoding_type"))
    if any(name.startswith("Baichuan") for name in names):  # the larger ones have it, and say so in their code only
        alibi = text("hidden_size") != 4096
    return {
        kind
        for kind, has in (
            ("encoder-decoder", encodes),
            ("sparse", text("index_topk") or text("index_topk_blocks") or text("sparse_attention_config")),
            ("compressed", text("compress_ratios")),
            ("mla", text("kv_lora_rank") and text("use_mla") is not False),
            ("cross-attention", text("cross_attention_layers")),
            ("state-space", not heads and (model_type == "xlstm" or any(text(name) for name in _STATES))),
            ("diffusion", top("canvas_length") or any(word in name for word in _DIFFUSERS for name in names)),
            (
                "bidirectional",
                text("is_causal") is False
                or text("use_bidirectional_attention") in (True, "all")
                or model_type in _PREFIX_MODELS,
            ),
            ("alibi", alibi),
        )
        if has
    }


def _latent_layer(fields: Fields, index: int, kind: LayerKind) -> CacheLayer:
    """A row a token: the latent, which is also the value of every head, and the rotated channels they share."""
    latent = fields.first("kv_lora_rank")
    return CacheLayer(index, 1, latent + (fields.integer("qk_rope_head_dim") or 0), latent, kind.window)


def _cache_layer(fields: Fields, index: int, kind: LayerKind, mixed: bool, heads: int) -> CacheLayer:
    """mixed: some layers of the model have a window."""
    own = fields.layer(index)
    sliding = kind.kind == "sliding"
    other = own.section("attention_other_setting") if sliding else None
    blocks = fields.sections("block_configs")
    attention = blocks[index].section("attention") if blocks else None

    def first(*names: str) -> int | None:
        for name in names:
            value = own(name)
            if isinstance(value, (list, tuple)):
                value = value[index] if index < len(value) else None
            if value:
                return own.checked(value, name)
        return None

    width_names, value_names, head_names = [], [], []
    if sliding:
        width_names, value_names, head_names = ["swa_head_dim"], ["swa_v_head_dim"], ["swa_num_key_value_heads"]
    elif mixed and own("per_layer_config") is None and own is fields:
        width_names = ["global_head_dim"]
        head_names = ["num_global_key_value_heads"] if fields("attention_k_eq_v") is not False else []
    width = first(*width_names, "head_dim", "attention_head_dim", "kv_channels", "d_kv")
    width = width or own.first("hidden_size", "n_embd", "d_model") // heads
    num_kv_heads = first(*head_names, *_head_names(own))
    if attention is not None and (size := attention.integer("n_heads_in_group")):
        num_kv_heads = heads // size
    if sliding and fields("model_type") == "mimo_v2_flash" and not own("swa_num_key_value_heads") and num_kv_heads:
        num_kv_heads *= 2  # Transformers' class keeps that to its code
    if own("multi_query") and not own("new_decoder_architecture"):
        num_kv_heads = 1  # Falcon and GPT-BigCode: whatever the number beside it says
    if other is not None:
        num_kv_heads = other.integer("num_attention_groups") or num_kv_heads
        width = other.integer("head_dim") or width
    if num_kv_heads is None and (attn := own.section("attn_config")) is not None:
        num_kv_heads = attn.integer("kv_n_heads")  # MPT and DBRX keep it one level deeper
    values = first(*value_names, "v_head_dim") if other is None else None
    return CacheLayer(index, num_kv_heads or heads, width, values or width, kind.window)


def _head_names(fields: Fields) -> tuple[str, ...]:
    """Under which names the KV heads are, the one that this kind of model uses first."""
    names = (
        "num_key_value_heads_per_layer",
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "num_attention_groups",
    )
    return ("multi_query_group_num", *names) if fields("multi_query_attention") else names


def _rotary_dim(fields: Fields, head_dim: int) -> int | None:
    parameters = fields("rope_parameters")
    factor = fields("partial_rotary_factor")
    if factor is None and isinstance(parameters, Mapping):
        factor = parameters.get("partial_rotary_factor")
    if factor is not None and not (isinstance(factor, (int, float)) and 0 <= factor <= 1):
        raise InputError(f"{fields.origin}: partial_rotary_factor is {factor!r}; expected a number from 0 to 1")
    return int(head_dim * factor) // 2 * 2 if factor is not None and factor < 1 else None
