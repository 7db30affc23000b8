"""Custom ops of the witness writer: K and V are one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 16


def _launch(
    exact: Tensor,
    fake: Tensor,
    pool: Tensor | None,
    side: Tensor,
    slot_mapping: Tensor,
    channel_band: Tensor,
    num_bands: int,
    whole: bool,
) -> None:
    """One of K and V; `pool` is None where the tokens lie in it already."""
    import triton

    from witcert_core.kernels.witness.triton import write_witness_kernel

    tokens, heads, dim = exact.shape
    if tokens == 0:
        return
    write_witness_kernel[(-(-tokens // TOKENS), heads)](
        exact,
        fake,
        fake if pool is None else pool,
        side,
        slot_mapping,
        channel_band,
        tokens,
        *((0, 0, 0) if pool is None else pool.stride()[:3]),
        num_bands,
        HKV=heads,
        D=dim,
        DP=triton.next_power_of_2(dim),
        PAGE=1 if pool is None else pool.shape[1],
        N=TOKENS,
        WHOLE=whole,
        STORE=pool is not None,
        num_warps=4,
    )


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
    _launch(exact_k, fake_k, k, witness, slot_mapping, channel_band, num_bands, False)
    _launch(exact_v, fake_v, v, value_witness, slot_mapping, channel_band, num_bands, True)


@torch.library.custom_op("witcert::record_witness", mutates_args=("witness", "value_witness"))
def record_witness_op(
    exact_k: Tensor,
    exact_v: Tensor,
    stored_k: Tensor,
    stored_v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    channel_band: Tensor,
    num_bands: int,
) -> None:
    """Of tokens that lie in the pool already."""
    _launch(exact_k, stored_k, None, witness, slot_mapping, channel_band, num_bands, False)
    _launch(exact_v, stored_v, None, value_witness, slot_mapping, channel_band, num_bands, True)


@write_witness_op.register_fake
@record_witness_op.register_fake
def _writes_in_place(*args: object, **kwargs: object) -> None:
    """Everything is written in place."""
