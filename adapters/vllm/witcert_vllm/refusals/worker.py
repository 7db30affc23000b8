"""What only a worker sees: the layers of the model that was loaded, their cache, and the model runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from witcert_core.serving import Refusal, check_query_heads, refuse
from witcert_vllm.drafts import own_layers
from witcert_vllm.refusals.server import BACKENDS

RUNNER: Refusal[Any] = Refusal(
    "model runners other than V1 and V2",
    "no place is known that names the requests of a pass",
    "install the vLLM version that `docs/limits.md` names, or unset WITCERT_POLICY to serve without a meter",
    lambda runner: (
        not hasattr(runner, "_prepare_inputs")
        and not hasattr(runner, "prepare_attn")
        and f"model runner {type(runner).__name__}"
    ),
)


@dataclass(frozen=True)
class Named:
    """A layer, or the specification of its cache, by vLLM's name."""

    name: str
    thing: Any


def _other_spec(spec: Named) -> str | bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    return type(spec.thing) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec) and (
        f"layer {spec.name} keeps its cache as {type(spec.thing).__name__}"
    )


def _other_layer(layer: Named) -> str | bool:
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return (
        type(layer.thing) not in (Attention, MLAAttention) and f"layer {layer.name} is a {type(layer.thing).__name__}"
    )


SPEC: Refusal[Named] = Refusal(
    "caches other than `FullAttentionSpec`, `MLAAttentionSpec` and `SlidingWindowSpec`, beside recurrent states "
    "(`MambaSpec`)",
    "which tokens stay in it is not known, or they are not kept one by one",
    "metered are layers that keep every token, or those of a sliding window",
    _other_spec,
)
PLAIN_ATTENTION: Refusal[Named] = Refusal(
    "layers other than vLLM's `Attention` and `MLAAttention`",
    "what they attend to is not known",
    "metered are these two",
    _other_layer,
)


def _uses(what: str, layer: Named) -> str:
    return f"attention layer {layer.name} uses {what}"


def _not_causal(layer: Named) -> str | bool:
    from vllm.v1.attention.backend import AttentionType

    if is_latent(layer.thing):  # vLLM makes decoders of these alone
        return False
    return layer.thing.attn_type != AttentionType.DECODER and _uses(f"{layer.thing.attn_type} attention", layer)


def is_latent(layer: Any) -> bool:
    """Whether an attention layer of vLLM's keeps latents (`MLAAttention`), not keys and values of heads."""
    return hasattr(layer, "kv_lora_rank")


_NOT_FOLLOWED = "the meter follows causal softmax over a layer's own keys"
_OTHER_MODEL = "metered are models without it"
LAYER_ROWS: tuple[Refusal[Named], ...] = (
    Refusal(
        f"attention backends other than {', '.join(f'`{name}`' for name in BACKENDS)}",
        "it is not wrapped",
        "choose another `--attention-backend`",
        lambda layer: (
            not hasattr(layer.thing.impl, "witcert_metered")
            and _uses(f"backend {layer.thing.attn_backend.__name__}", layer)
        ),
    ),
    Refusal("layers with cross-attention or bidirectional attention", _NOT_FOLLOWED, _OTHER_MODEL, _not_causal),
    Refusal(
        "layers that share the cache of others",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: (
            not is_latent(layer.thing)
            and layer.thing.kv_sharing_target_layer_name is not None
            and _uses("the cache of another layer", layer)
        ),
    ),
    Refusal(
        "layers with a bias of positions in the logits (ALiBi)",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: (
            getattr(layer.thing.impl, "alibi_slopes", None) is not None and _uses("ALiBi in the logits", layer)
        ),
    ),
    Refusal(
        "layers with chunked local attention",
        _NOT_FOLLOWED,
        _OTHER_MODEL,
        lambda layer: (
            getattr(layer.thing.impl, "chunk_lookback", -1) not in (-1, None)
            and _uses("chunked local attention", layer)
        ),
    ),
    Refusal(
        "latents of which an indexer chooses, or which several tokens of a request attend to at once (draft blocks)",
        "which of them a row reads is not followed",
        _OTHER_MODEL,
        lambda layer: (
            is_latent(layer.thing)
            and bool(layer.thing.use_sparse or layer.thing.non_causal_multi_token_decode)
            and _uses("latents that an indexer chooses, or draft blocks", layer)
        ),
    ),
    Refusal(
        "latent attention with padded heads",
        "the queries that come by are not those of the model's heads",
        "choose another `--attention-backend`",
        lambda layer: (
            is_latent(layer.thing) and layer.thing.q_pad_num_heads is not None and _uses("padded query heads", layer)
        ),
    ),
)
CLASS_ROWS: tuple[Refusal[Any], ...] = (
    Refusal(
        "a class of your own, `CUSTOM` or in the place of another backend, that is no `AttentionBackend` and "
        "`AttentionImpl` of vLLM's or has other parameters",
        "it cannot be wrapped",
        "derive it from vLLM's classes",
    ),
    Refusal(
        "a class of your own that writes its cache inside `forward`",
        "its layout cannot be checked at start",
        "write it in `do_kv_cache_update`",
    ),
    Refusal(
        "a class of your own under `quantizer.storage: packed`",
        "the meter's own attention reads codes, so that class would never run",
        "set `quantizer.storage` to 'simulated'",
    ),
    Refusal(
        "a cache that does not give back what was written to it in a layout the meter knows",
        "the meter would read something else than attention does",
        "choose another `--attention-backend`",
    ),
)
"""Refused in `backend.py`, `worker.py` and `pool.py`, where they show."""


def check_specs(specs: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for layers that cache something else than one plain row a token (`KVCacheSpec` by layer
    name) or a recurrent state."""
    for name, spec in specs.items():
        refuse([SPEC], Named(name, spec))


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """vLLM's attention layers by name, in order; UnsupportedError for one that does more than causal softmax.

    Layers that keep a recurrent state are none, and those that only make drafts are not the served model's.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    every = vllm_config.compilation_config.static_forward_context
    layers = {
        name: layer
        for name, layer in every.items()
        if isinstance(layer, AttentionLayerBase) and not isinstance(layer, MambaBase)
    }
    layers = {name: layers[name] for name in own_layers(layers, vllm_config)}
    for name, layer in layers.items():
        refuse([PLAIN_ATTENTION, *LAYER_ROWS], Named(name, layer))
    check_query_heads(layer.num_heads for layer in layers.values())
    return layers
