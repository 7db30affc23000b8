"""The metered attention backend: vLLM's own backend class with its implementation and metadata builder wrapped."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from witcert_core.errors import UnsupportedError
from witcert_vllm import process

# The CPU kernel's layouts that `pool.CpuPool` can read; AMX tiles interleave pairs of channels.
READABLE_ISA = ("vec", "vec16")


WRITE = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
BUILD = ("self", "common_prefix_len", "common_attn_metadata")


def check_contract(name: str, base: Any) -> None:
    """Raise UnsupportedError for a backend class that cannot be wrapped; `name` of the enum member it stands for."""
    described = f"attention backend {name} ({base.__module__}.{base.__qualname__})"
    if not (isinstance(base, type) and issubclass(base, AttentionBackend)):
        raise UnsupportedError(f"{described} is no AttentionBackend of vLLM's, so it cannot be metered")
    impl, builder = base.get_impl_cls(), base.get_builder_cls()
    if not issubclass(impl, AttentionImpl):
        raise UnsupportedError(f"{described} attends with {impl.__name__}, which is no AttentionImpl of vLLM's")
    wanted = [(impl.forward, FORWARD), (builder.build, BUILD)]
    if not base.forward_includes_kv_cache_update:
        wanted.append((getattr(impl, "do_kv_cache_update", None), WRITE))
    for function, expected in wanted:
        has = () if function is None else tuple(inspect.signature(function).parameters)
        if has[: len(expected)] != expected:
            what = "do_kv_cache_update" if function is None else function.__qualname__
            raise UnsupportedError(
                f"{described}: {what} takes ({', '.join(has)}), and vLLM passes ({', '.join(expected)}, ...); it "
                "cannot be metered like that"
            )


@functools.cache
def metered(base: type[Any], own_pages: bool = False) -> type[Any]:
    """A subclass of the backend class `base` whose layers hand every attention call of a real pass to the runtime.

    own_pages: the cache is packed, so the stock implementation can neither read nor write it and is never called.
    """
    impl_base: Any = base.get_impl_cls()
    builder_base: Any = base.get_builder_cls()
    separate_write = not base.forward_includes_kv_cache_update

    class Builder(builder_base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if getattr(self, "isa", None) == "amx":
                self.isa = "vec"
                self._set_isa_to_layers(self.layer_names)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            process.begin_pass(common_attn_metadata)
            return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    class Impl(impl_base):  # type: ignore[misc]
        witcert_metered = True

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
            if not process.in_pass() and not own_pages:
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
            if attn_metadata is None or not process.in_pass():
                if own_pages:
                    return output.zero_()
                return attend(
                    layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
                )
            runtime = process.runtime()
            update = super().do_kv_cache_update if separate_write else None
            slots = runtime.out_slots
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

    class Metered(base):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> type[Any]:
            return Impl

        @staticmethod
        def get_builder_cls() -> type[Any]:
            return Builder

    for cls, stock in ((Metered, base), (Impl, impl_base), (Builder, builder_base)):
        cls.__name__ = cls.__qualname__ = f"Metered{stock.__name__}"
    return Metered
