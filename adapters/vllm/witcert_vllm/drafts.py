"""Speculative decoding: which layers only make drafts, and which drafts leave the probabilistic tier standing.

vLLM keeps the cache of a draft model, or of layers that draft from hidden states (EAGLE, MTP), beside the served
model's: among the layers of one of its cache groups, or as a group of its own. These layers are left alone, since what
they write decides which drafts are made and not what is served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from witcert_core.errors import UnsupportedError
from witcert_core.serving import ADAPTIVE_DRAFTS

_DRAFT_MODEL = "draft_model."
"""How names of a whole draft model's layers begin, which are numbered from 0."""
FROM_TEXT = ("ngram", "ngram_gpu", "draft_model")
"""Methods whose drafts follow from the text so far, whatever the served model's cache holds."""


def own_layers(names: Iterable[str], vllm_config: Any) -> list[str]:
    """The layers of the served model among `names`: those that draft from its hidden states are numbered after it."""
    from vllm.model_executor.models.utils import extract_layer_index

    if vllm_config.speculative_config is None:
        return list(names)
    count = vllm_config.model_config.get_total_num_hidden_layers()
    return [name for name in names if not name.startswith(_DRAFT_MODEL) and extract_layer_index(name) < count]


def check_own_layers(names: Iterable[str], model: Any) -> None:
    """Raise UnsupportedError unless `names` are the attention layers that the served `model` itself holds."""
    held = {layer for module in model.modules() if isinstance(layer := getattr(module, "layer_name", None), str)}
    if strange := sorted(set(names) - held):
        raise UnsupportedError(
            f"by its number {strange[0]} is a layer of the served model, which does not hold it: which layers make "
            "drafts is not known; serve it without --speculative-config"
        )


def without_law(vllm_config: Any) -> str:
    """Why the drafts of this server leave no request the probabilistic tier; '' where they leave it.

    Those that follow from the text alone are right exactly where the text says so, by vLLM's standard rule; so which
    passes a text is cut into follows from the text. Others follow from what the cache gave back, dither and all.
    """
    drafts = vllm_config.speculative_config
    follows = drafts is None or (drafts.method in FROM_TEXT and drafts.rejection_sample_method == "standard")
    return "" if follows else ADAPTIVE_DRAFTS
