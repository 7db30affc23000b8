"""The witness of what tokens lost when an engine's pool took them.

Shapes: T tokens, Hkv KV heads, D and Dv channels, B bands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.errors import InputError
from witcert_core.kernels.host import checks
from witcert_core.kernels.host.dispatch import resolve
from witcert_core.kernels.witness.cpu import record_cpu
from witcert_core.kernels.witness.launch import launch_record
from witcert_core.kernels.witness.reference import record_witness_reference


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
    checks.check_vector("slot_mapping", slot_mapping, tokens, torch.int64)
    if bands.head_dim != exact_k.shape[2]:
        raise InputError(f"the band map is for {bands.head_dim} channels; K has {exact_k.shape[2]}")
    tensors = exact_k.contiguous(), exact_v.contiguous(), stored_k.contiguous(), stored_v.contiguous()
    backend = resolve(backend, exact_k.device)
    if backend == "reference":
        record_witness_reference(*tensors, witness, value_witness, slot_mapping, bands)
        return
    k, v, stored_k, stored_v = tensors
    band = checks.band_on(bands.channel_band, k.device)
    if backend == "cpu":
        record_cpu(*tensors, witness, value_witness, slot_mapping, band, bands.num_bands)
        return
    launch_record(k, stored_k, witness, slot_mapping, band, bands.num_bands)
    launch_record(v, stored_v, value_witness, slot_mapping, None, 1)


__all__ = ["record_witness"]
