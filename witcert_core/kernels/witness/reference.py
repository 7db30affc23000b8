"""The witness writer in plain torch."""

from __future__ import annotations

from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.cache.norm_codes import value_codes, witness_codes


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
    """``witness [SLOTS, Hkv, B]``, ``value_witness [SLOTS, Hkv]`` of tokens ``[N, Hkv, D]``; not of negative slots."""
    used = slot_mapping >= 0
    witness[slot_mapping[used]] = witness_codes(exact_k[used], stored_k[used], bands)
    value_witness[slot_mapping[used]] = value_codes(exact_v[used], stored_v[used])
