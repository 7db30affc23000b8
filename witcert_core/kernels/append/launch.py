"""Custom op of the INT8 writer."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 32
NUM_WARPS = 4


@torch.library.custom_op("witcert::append_int8", mutates_args=("k", "v", "k_scales", "v_scales", "witness", "k_bypass"))
def append_int8_op(
    key: Tensor,
    value: Tensor,
    k: Tensor,
    v: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    witness: Tensor | None,
    pass_ids: Tensor,
    slot_mapping: Tensor,
    head_ids: Tensor,
    bypass_keep: Tensor | None,
    bypass_channels: Tensor | None,
    k_bypass: Tensor | None,
    layer: int,
    seed: int,
) -> None:
    """Caches as ``[P, page_size, Hkv, D]`` views."""
    import triton

    from witcert_core.kernels.append.triton import append_kernel

    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    bypass = 0 if bypass_channels is None else int(bypass_channels.shape[1])
    append_kernel[(-(-tokens // TOKENS), heads, 2)](
        key,
        value,
        k,
        v,
        k_scales,
        v_scales,
        k_scales if witness is None else witness,
        pass_ids,
        head_ids,
        slot_mapping,
        head_ids if bypass_keep is None else bypass_keep,
        head_ids if bypass_channels is None else bypass_channels,
        key if k_bypass is None else k_bypass,
        tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *k.stride()[:3],
        *v.stride()[:3],
        layer,
        seed,
        HKV=heads,
        D=head_dim,
        DV=value.shape[2],
        PAGE=k.shape[1],
        N=TOKENS,
        WITNESS=witness is not None,
        BYPASS=bypass,
        BP=triton.next_power_of_2(max(bypass, 1)),
        num_warps=NUM_WARPS,
    )


@append_int8_op.register_fake
def _append_int8_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
