"""The INT8 writer in plain torch: what the kernel must store, code for code."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.cache.outliers import taken, without
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.quantizers.dither import dequantize_int8, dither_vectors, group_witness_codes, quantize_int8


def append_reference(key: Tensor, value: Tensor, cache: PackedCache, slot_mapping: Tensor, dither: DitherOf) -> None:
    """Tokens ``key [N, Hkv, D]``, ``value [N, Hkv, Dv]`` into ``slot_mapping [N]``; those with a negative slot are
    skipped."""
    page_size = cache.page_size
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    page, offset = slots // page_size, slots % page_size
    ids = cache.pass_ids[slots].to(torch.int64) & 0xFFFFFFFF
    u = dither_vectors(dither.key, ids, dither.layer, cache.head_ids.tolist(), key.shape[-1])
    exact = key[used].to(torch.float32)
    if cache.bypass is not None:
        index = cache.bypass.index
        cache.bypass.k[page, offset] = taken(key[used], index)
        exact, u = without(exact, index), without(u, index)
    codes, scales = quantize_int8(exact, u)
    cache.k[page, offset] = codes
    cache.k_scales[page, offset] = scales
    if cache.witness is not None:
        stored = dequantize_int8(codes, scales, u)
        # A group without a finite scale has no residual to speak of: its radius is infinite whatever the
        # code.
        finite = scales.isfinite().repeat_interleave(32, dim=-1)[..., : key.shape[-1]]
        known = torch.where(finite, exact, stored)
        found = group_witness_codes(known, stored, scales)
        cache.witness[page, offset] = torch.where(scales.isfinite(), found, 255)
    codes, scales = quantize_int8(value[used].to(torch.float32), torch.zeros(1))
    cache.v[page, offset] = codes
    cache.v_scales[page, offset] = scales
