"""Write keys and values into the packed INT8 cache: quantize, dither K, store codes, scales and group witness
at once.

Shapes: T tokens, Hkv KV heads, D and Dv channels, Gr = ceil(D / 32), P pages of ``page_size`` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.append.launch import append_int8_op
from witcert_core.kernels.append.reference import append_reference
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.backend import resolve
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.exact import exact_tensors
from witcert_core.kernels.host.pages import PagedKV, PageTable, check_int8_cache, check_side, split_cache
from witcert_core.quantizers.dither import DitherKey, num_groups


def slots_of(batch_indices: Tensor, positions: Tensor, table: PageTable, page_size: int) -> Tensor:
    """int64 ``[T]`` slot of token ``positions[t]`` of request ``batch_indices[t]`` (FlashInfer's append
    form)."""
    request, position = batch_indices.to(torch.int64), positions.to(torch.int64)
    entry = table.indptr.to(torch.int64)[request] + position // page_size
    return table.indices.to(torch.int64)[entry] * page_size + position % page_size


def append_int8(
    key: Tensor,
    value: Tensor,
    paged_kv_cache: PagedKV,
    k_scales: Tensor,
    v_scales: Tensor,
    pass_ids: Tensor,
    *,
    layer: int,
    head_ids: Tensor,
    dither_key: DitherKey,
    slot_mapping: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
    table: PageTable | None = None,
    witness: Tensor | None = None,
    bypass: BypassedKeys | None = None,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> None:
    """Quantize and store ``T`` tokens of one layer.

    Each group of 32 channels gets the smallest fp16 scale ``s`` with ``127 s >= max |x|`` (never clipped;
    +inf where the group holds NaN or infinity, which reads back as an infinite radius). K is dithered with
    the row of its slot, V rounded to nearest.

    Args:
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, post-RoPE, fp32, fp16 or bf16.
        paged_kv_cache, k_scales, v_scales, witness: the cache as
            :func:`~witcert_core.kernels.decode.decode_int8` reads it; ``witness`` uint8 ``[P, page_size, Hkv,
            Gr]`` takes the residual norms, rounded up.
        pass_ids: uint32 ``[slots]``, already holding this pass's row at the slots written.
        bypass: K channels kept in 16 bit: left out of ``amax``, code 0, copied to ``bypass.k``, which has key's dtype.
        layer, head_ids, dither_key: as in decoding.
        slot_mapping: int64 ``[T]``; a negative slot is padding and skipped. Or the other form:
        batch_indices, positions, table: int32 ``[T]`` each and the pages of the requests.

    Raises:
        InputError: shapes or dtypes that do not fit, or not exactly one of the two forms.
    """
    k_cache, v_cache = split_cache(paged_kv_cache, kv_layout)
    check_int8_cache(k_cache, v_cache, k_scales, v_scales)
    page_size, heads, head_dim = k_cache.shape[1:]
    if key.dim() != 3 or key.shape[1:] != (heads, head_dim) or value.shape != (*key.shape[:2], v_cache.shape[3]):
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [T, {heads}, {head_dim}] and "
            f"[T, {heads}, {v_cache.shape[3]}]"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise InputError("the channels of key and value must lie side by side in memory (last stride 1)")
    by_request = batch_indices is not None and positions is not None and table is not None
    if (slot_mapping is not None) == by_request:
        raise InputError("pass either slot_mapping, or batch_indices, positions and table together")
    if batch_indices is not None and positions is not None and table is not None:
        slot_mapping = slots_of(batch_indices, positions, table, page_size)
    dispatch.check_vector("slot_mapping", slot_mapping, key.shape[0], torch.int64)
    dispatch.check_vector("head_ids", head_ids, heads, torch.int32)
    if witness is not None:
        check_side("witness", witness, k_cache, num_groups(head_dim), torch.uint8)
    if bypass is not None:
        bypass.check(k_cache, key.dtype)
    ids = dispatch.pass_bits(pass_ids, k_cache.shape[0] * page_size)
    slots = slot_mapping if slot_mapping is not None else ids
    if resolve(backend, key.device) == "reference":
        append_reference(
            key,
            value,
            k_cache,
            v_cache,
            k_scales,
            v_scales,
            witness,
            ids,
            slots,
            layer,
            head_ids.tolist(),
            dither_key,
            bypass,
        )
        return
    append_int8_op(
        key,
        value,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        witness,
        ids,
        slots,
        head_ids,
        *exact_tensors(None, bypass)[3:],
        layer,
        dispatch.seed_of(dither_key),
    )


__all__ = ["append_int8", "slots_of"]
