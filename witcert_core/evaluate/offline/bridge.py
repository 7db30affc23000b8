"""What transformers is given: an attention function and a cache that hands on the new tokens only.

transformers calls the attention it finds under a name in its registry. Ours is found under `witcert` and asks the
engine whose pass is running; outside a pass it refuses. The engine keeps keys and values itself, so the cache that
transformers sees only counts tokens.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline.latent import Absorbed
from witcert_core.meter.attention import AttentionSpec

ATTENTION = "witcert"
_KNOWN = {"sliding_window", "softcap", "s_aux", "dropout", "scaling", "is_causal", "position_ids", "cache_position"}
_KNOWN |= {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
_KNOWN |= {"logits_to_keep"}


class Engine(Protocol):
    """Whoever attends for the pass that is running."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Outputs [B, N, H, Dv] for q [B, N, H, D] and the new tokens' k [B, N, Hkv, D] and v [B, N, Hkv, Dv]."""
        ...


class _Running(threading.local):
    engine: Engine | None = None


_RUNNING = _Running()
"""Of each thread by itself."""


def attend_with(engine: Engine | None) -> None:
    """Attention calls belong to `engine` from now on; to None, to nobody."""
    _RUNNING.engine = engine


@contextmanager
def running(engine: Engine) -> Iterator[None]:
    """Attention calls of the block belong to `engine`."""
    before = _RUNNING.engine
    attend_with(engine)
    try:
        yield
    finally:
        attend_with(before)


def register() -> None:
    """Make the attention known to transformers; doing it again changes nothing."""
    require("transformers.modeling_utils").AttentionInterface.register(ATTENTION, attention)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, N, D], key and value [B, Hkv, N, D]; returns [B, N, H, Dv].

    Raises:
        UnsupportedError: no pass is running, or the call asks for what the meter does not follow.
    """
    engine, layer = _RUNNING.engine, module.layer_idx
    if engine is None:
        raise UnsupportedError(
            "the metered attention was called outside a pass of the meter, by a layer alone or by a model that shares "
            "the metered one's configuration; call the metered model, or give the other copy.deepcopy(model.config)"
        )
    odd = sorted(name for name, given in options.items() if name not in _KNOWN and given is not None)
    if odd or attention_mask is not None:
        raise UnsupportedError(
            f"layer {layer} passes {odd or 'a mask of its own'} to its attention, which the meter does not follow"
        )
    causal = options.get("is_causal")
    if causal is None:  # an encoder's layers say it of themselves, and leave the rest to their mask
        causal = getattr(module, "is_causal", True)
    if options.get("dropout") or not causal:
        raise UnsupportedError(
            f"layer {layer} attends with dropout {options.get('dropout')}, is_causal {causal}; "
            "metered is causal attention without dropout: model.eval()"
        )
    window, scaling = options.get("sliding_window"), options.get("scaling")
    spec = AttentionSpec(
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        logits_soft_cap=float(options.get("softcap") or 0.0),
        window_left=-1 if window is None else int(window) - 1,
        sinks=None if options.get("s_aux") is None else options["s_aux"].to("cpu"),
    )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    latent = Absorbed(module, q, k) if Absorbed.is_of(module) else None
    if latent is not None:
        q, k, v = latent.q, latent.rows, latent.values
    # The cache and the meter are on the host, wherever the layer is.
    out = engine.attend(layer, q.to("cpu"), k.to("cpu"), v.to("cpu"), spec).to(query.device)
    return out if latent is None else latent.heads(out), None


def cache_argument(model: Any) -> str:
    """What this transformers calls the cache it is given: `cache`, or `past_key_values` before 5.24."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


class CountingCache:
    """Stands in for transformers' cache: hands the new tokens on and says how many came before them."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def update(self, key: Tensor, value: Tensor, _layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new tokens' keys and values [1, Hkv, N, D], as they came."""
        return key, value

    def get_seq_length(self, _layer: int = 0) -> int:
        return self.length
