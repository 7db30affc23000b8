"""Write keys and values into the packed INT8 cache: quantize, dither K, store codes, scales and group witness
at once.

Shapes: T tokens, Hkv KV heads, D and Dv channels, Gr = ceil(D / 32), P pages of ``page_size`` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.append.cpu import append_cpu
from witcert_core.kernels.append.launch import launch_append
from witcert_core.kernels.append.reference import append_reference
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.checks import check_vector
from witcert_core.kernels.host.dispatch import resolve
from witcert_core.kernels.host.pages import PagedKV
from witcert_core.quantizers.dither import DitherKey


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
    slot_mapping: Tensor,
    witness: Tensor | None = None,
    bypass: BypassedKeys | None = None,
    checked: PackedCache | None = None,
    backend: str = "auto",
) -> None:
    """Quantize and store ``T`` tokens of one layer.

    Each group of 32 channels gets the smallest fp16 scale ``s`` with ``127 s >= max |x|`` (never clipped;
    +inf where the group holds NaN or infinity, which reads back as an infinite radius). K is dithered with
    the vector of the pass that writes its slot, V rounded to nearest.

    Args:
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, post-RoPE, fp32, fp16 or bf16.
        paged_kv_cache, k_scales, v_scales, witness: the cache as
            :func:`~witcert_core.kernels.decode.decode_int8` reads it; ``witness`` uint8 ``[P, page_size, Hkv,
            Gr]`` takes the residual norms, rounded up.
        pass_ids: uint32 ``[slots]``, already holding this pass at the slots written.
        bypass: K channels kept in 16 bit: left out of ``amax``, code 0, copied to ``bypass.k``, which has key's dtype.
        layer, head_ids, dither_key: as in decoding.
        slot_mapping: int64 ``[T]``; a negative slot is padding and skipped.
        checked: the cache of these arguments, checked before for this dtype, which small calls would wait for again.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    if checked is None:
        given = (paged_kv_cache, k_scales, v_scales, pass_ids, head_ids, witness, bypass)
        checked = PackedCache.checked(*given, key.dtype)
    cache = checked
    heads, head_dim = cache.k.shape[2:]
    if key.dim() != 3 or key.shape[1:] != (heads, head_dim) or value.shape != (*key.shape[:2], cache.v.shape[3]):
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [T, {heads}, {head_dim}] and "
            f"[T, {heads}, {cache.v.shape[3]}]"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise InputError("the channels of key and value must lie side by side in memory (last stride 1)")
    check_vector("slot_mapping", slot_mapping, key.shape[0], torch.int64)
    write = {"reference": append_reference, "cpu": append_cpu, "triton": launch_append}[resolve(backend, key.device)]
    write(key, value, cache, slot_mapping, DitherOf(dither_key, layer))


__all__ = ["append_int8"]
