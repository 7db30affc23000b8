"""The INT8 writer."""

from __future__ import annotations

from torch import Tensor

from witcert_core.kernels.device.arguments import Heads, power_of_two
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.host.checks import seed_of

TOKENS = 32
NUM_WARPS = 4


def launch_append(key: Tensor, value: Tensor, cache: PackedCache, slot_mapping: Tensor, dither: DitherOf) -> None:
    """Keys ``[T, Hkv, D]`` and values ``[T, Hkv, Dv]`` into the slots ``[T]`` of the cache."""
    from witcert_core.kernels.append.triton import append_kernel

    tokens, heads, head_dim = key.shape
    dispatch.launch(
        append_kernel,
        (-(-tokens // TOKENS), heads, 2),
        Heads.of(key),
        Heads.of(value),
        cache.pages(),
        slot_mapping,
        tokens,
        dither.layer,
        seed_of(dither.key),
        HKV=heads,
        D=head_dim,
        DV=value.shape[2],
        PAGE=cache.page_size,
        N=TOKENS,
        BYPASS=cache.bypassed,
        BP=power_of_two(cache.bypassed),
        num_warps=NUM_WARPS,
    )
