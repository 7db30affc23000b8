"""Kinds of models that are not metered: by what their cache holds, or by what attention does that no radius covers."""

from __future__ import annotations

from typing import Protocol

from witcert_core.serving.refusals import Refusal

_WHOLE = "metered are layers that cache keys and values of their own"
_CAUSAL = "metered is causal softmax over a layer's own keys"
_DECODERS = "metered are decoder-only models"


class OfKinds(Protocol):
    """A model as far as it is described. name: what messages call it; kinds: the keys of `KINDS` that hold of it."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> frozenset[str]: ...

    def count(self, kind: str) -> str:
        """How many layers are of that kind, as messages say it; '' where it is one of the whole model."""
        ...


def _kind(kind: str, what: str, said: str, why: str, instead: str = _WHOLE) -> Refusal[OfKinds]:
    """said: what a model of this kind does, after its name."""
    return Refusal(what, why, instead, lambda model: kind in model.kinds and f"{model.name} {said}{model.count(kind)}")


KINDS: dict[str, Refusal[OfKinds]] = {
    "encoder-decoder": _kind(
        "encoder-decoder",
        "encoder-decoder models",
        "is an encoder-decoder model",
        "it has a cache of cross-attention beside its own",
        _DECODERS,
    ),
    "sparse": _kind(
        "sparse",
        "sparse attention over an index",
        "attends to the tokens that an index selects (sparse attention)",
        "which tokens are read is not known, and the index has a cache of its own",
    ),
    "mla": _kind(
        "mla",
        "multi-head latent attention (MLA)",
        "uses multi-head latent attention (MLA)",
        "its cache holds latents, not keys and values per head, which are not followed here",
    ),
    "compressed": _kind(
        "compressed",
        "compressed states of several tokens",
        "keeps compressed states of several tokens in place of their keys and values",
        "there is no witness for these",
    ),
    "cross-attention": _kind(
        "cross-attention",
        "layers with cross-attention",
        "has layers with cross-attention",
        "their keys are not those of the text",
        _CAUSAL,
    ),
    "state-space": _kind(
        "state-space",
        "state-space models",
        "has no attention",
        "it keeps a state a request, and no keys and values a token",
    ),
    "none": _kind(
        "none",
        "layers without a KV cache (linear attention, Mamba, convolutions)",
        "has layers without a KV cache",
        "what these keep is not followed",
    ),
    "state": _kind(
        "state",
        "layers that keep a recurrent state beside their KV cache",
        "has layers that keep a recurrent state beside their KV cache",
        "the state is not followed",
    ),
    "shared": _kind(
        "shared",
        "layers that share the cache of others",
        "has layers that share the cache of others",
        "the meter follows a layer's own keys",
    ),
    "chunked": _kind(
        "chunked",
        "layers with chunked local attention",
        "has layers with chunked local attention",
        "which tokens a row reads depends on where its chunk begins, which the meter does not follow",
    ),
    "sliding": _kind(
        "sliding",
        "layers with a sliding window",
        "has layers with a sliding window",
        "tokens leave the cache",
    ),
    "widths": _kind(
        "widths",
        "keys and values of different widths",
        "has keys and values of different widths",
        "vLLM has backends of their own for them (`FLASH_ATTN_DIFFKV`, `TRITON_ATTN_DIFFKV`), which are not wrapped",
        "metered are equal widths",
    ),
    "diffusion": _kind(
        "diffusion",
        "models that generate by diffusion",
        "generates by diffusion",
        "it attends both ways",
        _CAUSAL,
    ),
    "bidirectional": _kind(
        "bidirectional",
        "models that attend both ways",
        "attends both ways",
        "a row would read tokens that come after it",
        _CAUSAL,
    ),
    "alibi": _kind(
        "alibi",
        "a bias of positions in the logits (ALiBi)",
        "has a bias of positions in its logits (ALiBi)",
        "the meter does not follow it",
        _CAUSAL,
    ),
}
NO_CACHE = ("encoder-decoder", "sparse", "compressed", "cross-attention", "state-space")
"""Kinds of which no cache of keys and values can be described, in the order in which they are named."""
