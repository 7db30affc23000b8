"""Write foreign quantizers' keys and values into a 16- or 32-bit pool, and the witness of what that write
lost.

Shapes: T tokens, Hkv KV heads, D and Dv channels, B bands, P pages of ``page_size`` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.errors import InputError
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.backend import resolve
from witcert_core.kernels.host.pages import PagedKV, check_side, split_cache
from witcert_core.kernels.witness.launch import record_witness_op, write_witness_op
from witcert_core.kernels.witness.reference import record_witness_reference, write_witness_reference


def write_with_witness(
    exact_k: Tensor,
    exact_v: Tensor,
    fake_k: Tensor,
    fake_v: Tensor,
    paged_kv_cache: PagedKV,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    bands: BandMap,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> None:
    """Store ``T`` fake-quantized tokens in the pool's dtype, with the norms of their residuals rounded up.

    The residual is taken against what the pool holds after the cast, so storage rounding is inside.

    Args:
        exact_k, exact_v: ``[T, Hkv, D]``, ``[T, Hkv, Dv]`` what the run handed over, post-RoPE.
        fake_k, fake_v: the same shapes, what the quantizer made of them.
        paged_kv_cache: fp32, fp16 or bf16 pool.
        witness: uint8 ``[P, page_size, Hkv, B]`` band norms of K.
        value_witness: uint8 ``[P, page_size, Hkv, 1]`` norm of V.
        slot_mapping: int64 ``[T]``; negative slots are skipped.
        bands: partition of K's channels.
    """
    k, v = split_cache(paged_kv_cache, kv_layout)
    shape_k, shape_v = (exact_k.shape[0], *k.shape[2:]), (exact_k.shape[0], v.shape[2], v.shape[3])
    for name, tensor, shape in (
        ("exact_k", exact_k, shape_k),
        ("fake_k", fake_k, shape_k),
        ("exact_v", exact_v, shape_v),
        ("fake_v", fake_v, shape_v),
    ):
        if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
            raise InputError(f"{name} is {tuple(tensor.shape)}; it must be contiguous {tuple(shape)}")
    check_side("witness", witness, k, bands.num_bands, torch.uint8)
    check_side("value_witness", value_witness, k, 1, torch.uint8)
    dispatch.check_vector("slot_mapping", slot_mapping, exact_k.shape[0], torch.int64)
    if bands.head_dim != k.shape[3]:
        raise InputError(f"the band map is for {bands.head_dim} channels; K has {k.shape[3]}")
    if resolve(backend, exact_k.device) == "reference":
        write_witness_reference(exact_k, exact_v, fake_k, fake_v, k, v, witness, value_witness, slot_mapping, bands)
        return
    band = dispatch.band_on(bands.channel_band, exact_k.device)
    write_witness_op(
        exact_k, exact_v, fake_k, fake_v, k, v, witness, value_witness, slot_mapping, band, bands.num_bands
    )


def record_witness(
    exact_k: Tensor,
    exact_v: Tensor,
    stored_k: Tensor,
    stored_v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    bands: BandMap,
    *,
    backend: str = "auto",
) -> None:
    """The norms of what ``T`` tokens lost that lie in an engine's pool already, rounded up.

    Args:
        exact_k, exact_v: ``[T, Hkv, D]``, ``[T, Hkv, Dv]`` what the run handed over, post-RoPE, in 16 or 32 bit.
        stored_k, stored_v: the same shapes, what the pool gives back.
        witness: uint8 ``[SLOTS, Hkv, B]`` band norms of K, written in place.
        value_witness: uint8 ``[SLOTS, Hkv]`` norm of V, written in place.
        slot_mapping: int64 ``[T]``; negative slots are skipped.
        bands: partition of K's channels.

    Raises:
        InputError: shapes or dtypes that do not fit together.
    """
    tokens, heads = exact_k.shape[:2]
    for name, exact, stored in (("k", exact_k, stored_k), ("v", exact_v, stored_v)):
        if stored.shape != exact.shape or exact.shape[:2] != (tokens, heads):
            raise InputError(
                f"exact_{name} is {tuple(exact.shape)} and stored_{name} {tuple(stored.shape)}; both must be "
                f"[{tokens}, {heads}, channels]"
            )
        wide = [x.dtype for x in (exact, stored) if not x.dtype.is_floating_point or x.element_size() > 4]
        if wide:
            raise InputError(f"{name} has dtype {wide[0]}; floating-point numbers of up to 32 bit are needed")
    for name, side, shape in (
        ("witness", witness, (witness.shape[0], heads, bands.num_bands)),
        ("value_witness", value_witness, (witness.shape[0], heads)),
    ):
        if side.shape != shape or side.dtype != torch.uint8 or not side.is_contiguous():
            raise InputError(f"{name} is {side.dtype} {tuple(side.shape)}; it must be contiguous torch.uint8 {shape}")
    dispatch.check_vector("slot_mapping", slot_mapping, tokens, torch.int64)
    if bands.head_dim != exact_k.shape[2]:
        raise InputError(f"the band map is for {bands.head_dim} channels; K has {exact_k.shape[2]}")
    tensors = exact_k.contiguous(), exact_v.contiguous(), stored_k.contiguous(), stored_v.contiguous()
    if resolve(backend, exact_k.device) == "reference":
        record_witness_reference(*tensors, witness, value_witness, slot_mapping, bands)
        return
    band = dispatch.band_on(bands.channel_band, exact_k.device)
    record_witness_op(*tensors, witness, value_witness, slot_mapping, band, bands.num_bands)


__all__ = ["record_witness", "write_with_witness"]
