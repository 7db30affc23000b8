"""Attention backends of a user's own, for `--attention-backend CUSTOM`."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def choose(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
    """As vLLM's CUDA platform chooses; its CPU platform ignores `--attention-backend`."""
    return str((selected_backend or AttentionBackendEnum.CPU_ATTN).get_path())


class CountingImpl(CPUAttentionBackendImpl):
    """vLLM's, and it counts its calls."""

    calls = 0

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        CountingImpl.calls += attn_metadata is not None
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )


class Counting(CPUAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CountingImpl


class HalvingImpl(CPUAttentionBackendImpl):
    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().do_kv_cache_update(layer, key / 2, value, kv_cache, slot_mapping)


class Halving(Counting):
    """Keeps half of each key: nothing the meter could read."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return HalvingImpl


class TiltedImpl(CPUAttentionBackendImpl):
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *scales: Any
    ) -> Any:
        return super().forward(layer, query * 1.2, key, value, kv_cache, attn_metadata, output, *scales)


class Tilted(Counting):
    """Attends with another scale than it says: its cache is what it should be, its weights are not."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TiltedImpl


class WritesInForward(Counting):
    forward_includes_kv_cache_update = True


class OtherImpl(CPUAttentionBackendImpl):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return q


class OtherForward(Counting):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return OtherImpl


class NotABackend:
    pass
