"""The metered attention backends: vLLM's own classes, whose attention calls go through the runtime.

vLLM looks backends up by dotted path; `witcert_vllm.backend.TRITON_ATTN` is the metered class in the place of the one
that `TRITON_ATTN` named before. These classes are made on first use, so that no backend is imported that is not used
(most of them need a GPU).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from witcert_core.errors import UnsupportedError
from witcert_vllm import process
from witcert_vllm.installation import current
from witcert_vllm.latent import FORWARD_MHA, FORWARD_MQA, LATENT_WRITE, MeteredLatentBuilder, MeteredLatentImpl
from witcert_vllm.packed import packed_backend

STOCK: dict[str, str] = {}
"""Enum member -> dotted path of the class it named before."""
WRITE = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
BUILD = ("self", "common_prefix_len", "common_attn_metadata")


# Which class a name means ---------------------------------------------------------------------------------------


def take_over(names: Iterable[str]) -> None:
    """Put the metered classes in the place of what is registered now.

    Called again where an engine and a worker begin: another plugin may have registered its own since.
    """
    for name in names:
        member = AttentionBackendEnum[name]
        try:
            path = member.get_path()
        except ValueError:  # CUSTOM, while nobody has registered one
            continue
        if not path.startswith(__name__):
            STOCK[name] = path
            register_backend(member, f"{__name__}.{name}")


def is_stock(name: str) -> bool:
    """Whether the backend of that name is vLLM's, not a class of the user's own."""
    return STOCK.get(name, "vllm.").startswith("vllm.")


def described(name: str) -> str:
    """A backend's name, with the class where that is the user's own."""
    return name if is_stock(name) else f"{name} ({STOCK[name]})"


def __getattr__(name: str) -> Any:
    if name not in STOCK:
        raise AttributeError(f"no metered backend {name!r}")
    policy = current()
    stock = resolve_obj_by_qualname(STOCK[name])
    check_contract(name, stock)
    packed = policy.quantizer.storage == "packed"
    if packed and not is_stock(name):
        raise UnsupportedError(
            f"attention backend {described(name)} with quantizer.storage: packed: the meter's own attention reads "
            "codes, so that class would never run; set quantizer.storage to 'simulated'"
        )
    cls = metered(stock, own_pages=packed)
    if packed:
        cls = packed_backend(cls, policy)
    cls.__module__, cls.__qualname__ = __name__, name  # the path by which vLLM finds it again
    return cls


def check_contract(name: str, base: Any) -> None:
    """Raise UnsupportedError for a backend class that cannot be wrapped; `name` of the enum member it stands for."""
    described = f"attention backend {name} ({base.__module__}.{base.__qualname__})"
    if not (isinstance(base, type) and issubclass(base, AttentionBackend)):
        raise UnsupportedError(f"{described} is no AttentionBackend of vLLM's, so it cannot be metered")
    backend: Any = base  # vLLM has no types here
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    latent = backend.is_mla()
    family = MLAAttentionImpl if latent else AttentionImpl
    if not issubclass(impl, family):
        raise UnsupportedError(f"{described} attends with {impl.__name__}, which is no {family.__name__} of vLLM's")
    wanted: dict[str, tuple[Any, tuple[str, ...]]] = {"build": (builder, BUILD)}
    if latent:
        wanted |= {"forward_mha": (impl, FORWARD_MHA), "forward_mqa": (impl, FORWARD_MQA)}
    else:
        wanted |= {"forward": (impl, FORWARD)}
    if not backend.forward_includes_kv_cache_update:
        wanted["do_kv_cache_update"] = impl, LATENT_WRITE if latent else WRITE
    for method, (cls, expected) in wanted.items():
        function = getattr(cls, method, None)
        has = () if function is None else tuple(inspect.signature(function).parameters)
        if has[: len(expected)] != expected:
            what = method if function is None else function.__qualname__
            raise UnsupportedError(
                f"{described}: {what} takes ({', '.join(has)}), and vLLM passes ({', '.join(expected)}, ...); it "
                "cannot be metered like that"
            )


# What is added to vLLM's classes --------------------------------------------------------------------------------


@functools.cache
def metered(base: type[Any], own_pages: bool = False) -> type[Any]:
    """A subclass of the backend class `base` whose layers hand every attention call of a real pass to the runtime.

    own_pages: the cache is packed, so the stock implementation can neither read nor write it and is never called.
    """
    backend: Any = base  # vLLM has no types here
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    of_impl = {"own_pages": own_pages, "separate_write": not base.forward_includes_kv_cache_update}
    ours: tuple[type[Any], type[Any]] = (MeteredImpl, MeteredBuilder)
    if backend.is_mla():
        of_impl, ours = {"own_pages": own_pages}, (MeteredLatentImpl, MeteredLatentBuilder)
    classes = {
        "metered_impl": type(f"Metered{impl.__name__}", (ours[0], impl), of_impl),
        "metered_builder": type(f"Metered{builder.__name__}", (ours[1], builder), {}),
    }
    return type(f"Metered{base.__name__}", (MeteredBackend, base), classes)


class MeteredBackend(AttentionBackend):
    """What is added to a backend: its two other classes are the metered ones."""

    metered_impl: type[Any]
    metered_builder: type[Any]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.metered_impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.metered_builder


class MeteredBuilder(AttentionMetadataBuilder):
    """What is added to a metadata builder: it begins the pass, and chooses a layout of the cache that can be read."""

    # With it vLLM would hand the slots of further cache groups past `build`.
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "isa", None) == "amx":  # whose tiles interleave pairs of channels
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        process.metadata_built(self.layer_names, common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)


class MeteredImpl(AttentionImpl):
    """What is added to an implementation: writes wait for `forward`, and `forward` goes through the runtime.

    own_pages: see `metered`. separate_write: whether vLLM writes the cache apart from `forward`.
    """

    witcert_metered = True
    own_pages: bool
    separate_write: bool

    # Fused with RoPE the write would not come by; with a quantized output a repaired row would miss its scale.
    def fused_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        return False

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Outside a pass vLLM's own; in one the write waits for `forward`, where what is written is decided."""
        if not process.meters(layer.layer_name) and not self.own_pages:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        attend = super().forward
        if attn_metadata is None or not process.meters(layer.layer_name):
            if self.own_pages:
                return output.zero_()
            own: Tensor = attend(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return own
        runtime = process.runtime()
        update = super().do_kv_cache_update if self.separate_write else None
        slots = runtime.written_of(runtime.layer_ids[layer.layer_name])
        count = slots.numel()

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            k = key[:count] if own_k is None else own_k
            v = value[:count] if own_v is None else own_v
            if update is not None:
                update(layer, k, v, kv_cache, slots)
            attend(layer, query, k, v, kv_cache, attn_metadata, output, output_scale, output_block_scale)
            return output[:count]

        result = runtime.attend_layer(self, layer, query[:count], key, value, run)
        if result.data_ptr() != output.data_ptr():
            output[:count] = result.view_as(output[:count])
        return output
