"""The witness writer in plain torch."""

from __future__ import annotations

from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import value_codes, witness_codes


def write_witness_reference(
    exact_k: Tensor,
    exact_v: Tensor,
    fake_k: Tensor,
    fake_v: Tensor,
    k: Tensor,
    v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    bands: BandMap,
) -> None:
    """Pools ``[P, page_size, Hkv, D]`` views, written in place; negative slots are skipped."""
    used = slot_mapping >= 0
    page, offset = slot_mapping[used] // k.shape[1], slot_mapping[used] % k.shape[1]
    stored_k, stored_v = fake_k[used].to(k.dtype), fake_v[used].to(v.dtype)
    k[page, offset] = stored_k
    v[page, offset] = stored_v
    sides = witness.flatten(0, 1), value_witness.flatten(0, 1)[..., 0]
    record_witness_reference(exact_k[used], exact_v[used], stored_k, stored_v, *sides, slot_mapping[used], bands)


def record_witness_reference(
    exact_k: Tensor,
    exact_v: Tensor,
    stored_k: Tensor,
    stored_v: Tensor,
    witness: Tensor,
    value_witness: Tensor,
    slot_mapping: Tensor,
    bands: BandMap,
) -> None:
    """Side tensors by slot, written in place; negative slots are skipped."""
    used = slot_mapping >= 0
    witness[slot_mapping[used]] = witness_codes(exact_k[used], stored_k[used], bands)
    value_witness[slot_mapping[used]] = value_codes(exact_v[used], stored_v[used])
