"""What each layer of a model attends and keeps, read from its configuration under any of the names that models use.

A pattern is read from the most explicit name there is; windows are laid over it. `names.py` refuses names that
speak of such things and are not read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.serving.models.fields import Fields

Kind = Literal["full", "sliding", "chunked", "sparse", "none"]


@dataclass(frozen=True)
class LayerKind:
    """What one layer attends. `none`: it keeps no keys and values; state: it keeps a recurrent state (beside them).

    window: tokens that a sliding or chunked layer looks back over, its own included.
    """

    kind: Kind
    state: bool = False
    window: int | None = None


_WORDS: dict[str, LayerKind] = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "full"), LayerKind("full")),
    **dict.fromkeys(("sliding_attention", "local", "local_attention", "swa", "sliding"), LayerKind("sliding")),
    "chunked_attention": LayerKind("chunked"),
    **dict.fromkeys(
        (
            "indexed_attention",
            "deepseek_sparse_attention",
            "qwen_sparse_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "minimax_m3_sparse",
        ),
        LayerKind("sparse"),
    ),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "linear"), LayerKind("none", True)),
    **dict.fromkeys(("mlp", "moe", "dense", "sparse"), LayerKind("none")),
    "hybrid": LayerKind("full", True),
    "hybrid_sliding": LayerKind("sliding", True),
}
_STATES = (
    "mamba_d_state",
    "mamba_d_ssm",
    "mamba_n_heads",
    "ssm_state_size",
    "ssm_cfg",
    "linear_num_key_heads",
    "linear_conv_kernel_dim",
    "linear_attn_config",
    "conv_L_cache",
    "lru_width",
)
"""Names that only a model with recurrent layers has."""
_LETTERS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
_PATTERN_OF_TYPE = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Model type -> every how many layers one attends everything; its published files leave that to the code."""
_BOTH = ("falcon_h1",)
"""Model types whose every layer has attention and a recurrent state; their published files leave that to the code."""
_SAYS_WINDOWS = ("layer_types", "hybrid_layer_pattern", "attention_layers")
"""Lists that tell layers with a window from others; what another one calls attention may have a window."""


def layer_kinds(fields: Fields, count: int) -> list[LayerKind]:
    """The kind of each of `count` layers.

    Raises:
        InputError: a list that does not fit the layers, or a value of another type than expected.
        UnsupportedError: a kind of layer that is not known here, or recurrent layers of which nothing says where.
    """
    kinds = _pattern(fields, count)
    window, chunk = _window(fields), fields.integer("attention_chunk_size")
    if kinds is None:
        if state := next((name for name in _STATES if fields(name)), None):
            raise UnsupportedError(
                f"{fields.origin}: {state} speaks of recurrent layers, but no name that is understood says which "
                "layers attend; please report the model"
            )
        kinds = [LayerKind("full")] * count if chunk is None else _chunked(fields, count)
    if window is not None and chunk is None and not any(fields(name) for name in _SAYS_WINDOWS):
        kinds = _windowed(fields, kinds)
    spans = {"sliding": window, "chunked": chunk}
    kinds = [replace(kind, window=spans.get(kind.kind)) for kind in kinds]
    # A window that was switched off (or never given) leaves its layers whole.
    return [replace(kind, kind="full") if kind.kind == "sliding" and not kind.window else kind for kind in kinds]


def _pattern(fields: Fields, count: int) -> list[LayerKind] | None:
    """The layers as the configuration lists them; None where it lists none."""

    def listed(name: str, words: Sequence[str]) -> list[LayerKind]:
        if odd := sorted(set(words) - set(_WORDS)):
            raise UnsupportedError(
                f"{fields.origin}: {name} has layers of type {odd[0]!r}, whose cache this does not know"
            )
        if len(words) < count:
            raise InputError(f"{fields.origin}: {name} names {len(words)} layers, but there are {count}")
        return [_WORDS[word] for word in words[:count]]  # some files go on with draft layers

    def chosen(attends: Callable[[int], bool], other: str, word: str = "attention") -> list[LayerKind]:
        return [_WORDS[word if attends(layer) else other] for layer in range(count)]

    if blocks := fields.sections("block_configs"):
        return listed("block_configs", ["attention" if _attends(block) else "mlp" for block in blocks])
    for name in ("layer_types", "layers_block_type"):
        if words := fields.words(name):
            return listed(name, words)
    if words := fields.words("block_types"):
        return listed("block_types", [words[layer % len(words)] for layer in range(count)])
    if letters := fields("hybrid_override_pattern"):
        return listed("hybrid_override_pattern", [_LETTERS.get(letter, letter) for letter in str(letters)])
    if types := fields.integers("attn_type_list"):
        return listed("attn_type_list", ["attention" if kind == 1 else "linear_attention" for kind in types])
    if types := fields.integers("hybrid_layer_pattern"):
        return listed("hybrid_layer_pattern", ["sliding_attention" if kind == 1 else "attention" for kind in types])
    linear = fields.section("linear_attn_config")
    if linear is not None and (layers := linear.integers("full_attn_layers")):
        return chosen({layer - 1 for layer in layers}.__contains__, "linear_attention")  # counted from 1
    if interval := fields.integer("full_attention_interval"):
        return chosen(lambda layer: (layer + 1) % interval == 0, "linear_attention")
    if period := fields.integer("attn_layer_period"):
        offset = fields.integer("attn_layer_offset", 0) or 0
        return chosen(lambda layer: layer % period == offset, "mamba")
    for name, other, word in (
        ("attn_layer_indices", "mamba", "attention"),
        ("full_attn_idxs", "conv", "attention"),
        ("hybrid_layer_ids", "mamba", "hybrid"),
    ):
        if layers := fields.integers(name):
            return chosen(set(layers).__contains__, other, word)
    if words := fields.words("attention_layers"):
        return listed("attention_layers", words)
    return [_WORDS["hybrid"]] * count if fields("model_type") in _BOTH else None


def _attends(block: Fields) -> bool:
    """Whether a block of a searched architecture keeps its attention."""
    attention = block.section("attention")
    return attention is not None and not (attention("no_op") or attention("replace_with_linear"))


def _window(fields: Fields) -> int | None:
    """The tokens that a layer with a window looks back over, where that is switched on."""
    names = ["sliding_window", "sliding_window_size", "attention_window_size"]
    if fields("attention_layers"):  # GPT-Neo; elsewhere this is the window of a vision part
        names.append("window_size")
    if fields("use_sliding_window") is False:
        return None
    values = (fields(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _windowed(fields: Fields, kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """Windows over layers that no list calls sliding: all of them, unless a pattern says which."""
    names = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    name = next((name for name in names if fields(name)), names[0])
    pattern = fields(name) or _PATTERN_OF_TYPE.get(fields("model_type") or "")
    first = fields.integer("max_window_layers", 0) if fields("use_sliding_window") else None

    def slides(layer: int) -> bool:
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)].upper() == "L"
        if pattern is not None:
            return (layer + 1) % fields.checked(pattern, name) != 0
        return first is None or layer >= first

    return [
        replace(kind, kind="sliding") if kind.kind == "full" and slides(layer) else kind
        for layer, kind in enumerate(kinds)
    ]


def _chunked(fields: Fields, count: int) -> list[LayerKind]:
    """Chunks in the layers that have a rotary embedding: all but every fourth, where no list says."""
    every = fields.integer("no_rope_layer_interval") or 4
    rotated = fields.integers("no_rope_layers") or [(layer + 1) % every for layer in range(count)]
    if len(rotated) < count:
        raise InputError(f"{fields.origin}: no_rope_layers names {len(rotated)} layers, but there are {count}")
    return [LayerKind("chunked") if turns else LayerKind("full") for turns in rotated[:count]]
