"""Names in configurations that speak of a model's attention: which are read, which say nothing of its cache.

A name that speaks of the layers or heads of attention and is neither is an error: to leave it out would be to count,
and to meter, something else than what is served.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from witcert_core.errors import UnsupportedError

_UNDERSTOOD = frozenset(
    {
        "layer_types",
        "layers_block_type",
        "block_types",
        "block_configs",
        "hybrid_override_pattern",
        "hybrid_layer_pattern",
        "attn_type_list",
        "linear_attn_config",
        "full_attention_interval",
        "attn_layer_period",
        "attn_layer_offset",
        "attn_layer_indices",
        "full_attn_idxs",
        "hybrid_layer_ids",
        "attention_layers",
        "attention_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "max_window_layers",
        "global_attn_every_n_layers",
        "attention_chunk_size",
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
        "num_attention_heads",
        "attention_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query",
        "multi_query_attention",
        "multi_query_group_num",
        "num_attention_groups",
        "n_kv_heads",
        "attn_config",
        "attention_other_setting",
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        "swa_num_attention_heads",
        "global_head_dim",
        "swa_head_dim",
        "swa_v_head_dim",
        "attention_head_dim",
        "num_kv_shared_layers",
        "num_key_value_heads_per_layer",
        "use_cla",
        "cla_share_factor",
        "cross_attention_layers",
        "kv_channels",
    }
)
# Of other layers, of query heads alone, or of a model's drafts and encoders: the cache does not depend on them.
_ELSEWHERE = frozenset(
    {
        "mlp_layer_types",
        "no_rope_layers",
        "no_rope_layer_interval",
        "num_attention_heads_per_layer",
        "num_sliding_attention_heads",
        "prefix_dense_sliding_window_pattern",
        "indexer_types",
        "use_shared_attention_adapter",
        "mamba_head_dim",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_d_head",
        "n_mamba_heads",
        "mamba_n_groups",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_heads",
        "linear_head_dim",
        "index_n_heads",
        "index_head_dim",
    }
)
# Parts with a cache of their own or none, and what an engine notes of a size before it padded it.
_ASIDE = ("original_", "mtp_", "vision_", "audio_", "encoder_", "decoder_", "image_", "draft_", "speech_", "conf_")
_ATTENTION = frozenset(
    {
        "attn",
        "attention",
        "attentions",
        "swa",
        "sliding",
        "hybrid",
        "mixer",
        "linear",
        "lightning",
        "mamba",
        "ssm",
        "recurrent",
        "kda",
        "gdn",
        "window",
        "windows",
    }
)
_PLACES = frozenset(
    {
        "layer",
        "layers",
        "pattern",
        "period",
        "interval",
        "offset",
        "type",
        "types",
        "list",
        "frequency",
        "freq",
        "every",
        "idx",
        "idxs",
        "indices",
        "indexes",
        "ids",
        "schedule",
        "map",
    }
)
_KEYS, _HEADS = frozenset(("kv", "key", "keys", "attention", "attn")), frozenset(("head", "heads", "group", "groups"))
_SHARE = frozenset(("share", "shared", "sharing", "reuse"))
_CACHES = frozenset(("kv", "cla", "cache", "attn", "attention"))
_OF_NUMBERS = frozenset(
    {"norm", "layernorm", "bias", "dropout", "drop", "eps", "scale", "multiplier", "rope", "theta", "dtype", "dim"}
)
"""A name with one of these speaks of what attention computes with, not of where it is or what it keeps."""


def check_names(values: Mapping[str, Any], origin: str) -> None:
    """UnsupportedError for a name that speaks of the layers or heads of attention and is not known here.

    values: name -> value of a configuration (of the text part, where a model has several); names without a value
    (None, False, 0, empty) say nothing, nor do fractions.
    """
    for name in sorted(values):
        parts = set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_"))
        pairs = ((_ATTENTION, _PLACES), (_KEYS, _HEADS), (_SHARE, _CACHES))
        speaks = any(parts & one and parts & other for one, other in pairs) and not parts & _OF_NUMBERS
        if not speaks or not values[name] or isinstance(values[name], float) or name.startswith(_ASIDE):
            continue
        if name not in _UNDERSTOOD and name not in _ELSEWHERE:
            shown = repr(values[name])
            shown = shown if len(shown) < 40 else f"{shown[:36]} ..."
            raise UnsupportedError(
                f"{origin}: {name} ({shown}) says something of its attention layers or heads that is not understood "
                "here, so its cache is not known; please report the model"
            )
