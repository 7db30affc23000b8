"""Custom op of the witness writer: K and V are one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 16


@torch.library.custom_op("witcert::write_witness", mutates_args=("k", "v", "witness", "value_witness"))
def write_witness_op(
    exact_k: Tensor,
    exact_v: Tensor,
    fake_k: Tensor,
    fake_v: Tensor,
    k: Tensor,
    v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    channel_band: Tensor,
    num_bands: int,
) -> None:
    """Pools as ``[P, page_size, Hkv, D]`` views."""
    import triton

    from witcert_core.kernels.witness.triton import write_witness_kernel

    tokens, heads = exact_k.shape[:2]
    if tokens == 0:
        return
    for exact, fake, pool, side, whole in (
        (exact_k, fake_k, k, witness, False),
        (exact_v, fake_v, v, value_witness, True),
    ):
        dim = exact.shape[2]
        write_witness_kernel[(-(-tokens // TOKENS), heads)](
            exact,
            fake,
            pool,
            side,
            slot_mapping,
            channel_band,
            tokens,
            *pool.stride()[:3],
            num_bands,
            HKV=heads,
            D=dim,
            DP=triton.next_power_of_2(dim),
            PAGE=pool.shape[1],
            N=TOKENS,
            WHOLE=whole,
            num_warps=4,
        )


@write_witness_op.register_fake
def _write_witness_fake(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
