"""The INT8 writer in plain torch: what the kernel must store, code for code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from witcert_core.cache.outliers import taken, without
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.quantizers.dither import DitherKey, dequantize_int8, group_witness_codes, quantize_int8, rows


def append_reference(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    witness: Tensor | None,
    pass_ids: Tensor,
    slot_mapping: Tensor,
    layer: int,
    head_ids: Sequence[int],
    dither_key: DitherKey,
    bypass: BypassedKeys | None = None,
) -> None:
    """Caches ``[P, page_size, Hkv, D]`` views, written in place; tokens with a negative slot are skipped."""
    page_size = k_cache.shape[1]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    page, offset = slots // page_size, slots % page_size
    ids = pass_ids[slots].to(torch.int64) & 0xFFFFFFFF
    u = rows(dither_key, ids, layer, head_ids, key.shape[-1])
    exact = key[used].to(torch.float32)
    if bypass is not None:
        bypass.k[page, offset] = taken(key[used], bypass.index)
        exact, u = without(exact, bypass.index), without(u, bypass.index)
    codes, scales = quantize_int8(exact, u)
    k_cache[page, offset] = codes
    k_scales[page, offset] = scales
    if witness is not None:
        stored = dequantize_int8(codes, scales, u)
        # A group without a finite scale has no residual to speak of: its radius is infinite whatever the
        # code.
        finite = scales.isfinite().repeat_interleave(32, dim=-1)[..., : key.shape[-1]]
        known = torch.where(finite, exact, stored)
        found = group_witness_codes(known, stored, scales)
        witness[page, offset] = torch.where(scales.isfinite(), found, 255)
    codes, scales = quantize_int8(value[used].to(torch.float32), torch.zeros(1))
    v_cache[page, offset] = codes
    v_scales[page, offset] = scales
