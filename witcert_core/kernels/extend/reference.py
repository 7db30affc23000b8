"""Extend attention in float64: an INT8 prefix, then the chunk's own exact keys."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from witcert_core.kernels.decode.reference import PackedTokens, product_radii, read_packed, row_results, softmax_error
from witcert_core.kernels.extend.launch import Chunk
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.sums import NUM_ACC_FIELDS


def extend_reference(
    chunk: Chunk,
    cache: PackedCache,
    dither: DitherOf,
    spec: AttentionSpec,
    meter_rows: Tensor,
    delta_loc: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[T, H, Dv]`` and base-2 lse ``[T, H]`` of all rows, accumulators ``[R, H, 16]`` of ``meter_rows [R]``,
    which may spend ``delta_loc [R]``; float64."""
    num_rows, heads = chunk.q.shape[:2]
    out = torch.zeros(num_rows, heads, chunk.v.shape[2], dtype=torch.float64)
    lse = torch.zeros(num_rows, heads, dtype=torch.float64)
    acc = torch.zeros(meter_rows.numel(), heads, NUM_ACC_FIELDS, dtype=torch.float64)
    lengths, wanted = chunk.table.lengths(cache.page_size), meter_rows.tolist()
    deltas = [0.0] * len(wanted) if delta_loc is None else delta_loc.tolist()
    for request, (low, high) in enumerate(itertools.pairwise(chunk.qo_indptr.tolist())):
        old = read_packed(chunk.table.slots(request, lengths[request], cache.page_size), cache, dither)
        for r in range(low, high):
            out[r], lse[r], _ = _row(chunk, old, spec, low, r, 0.0)
            for i, delta in enumerate(deltas):
                if wanted[i] == r:
                    acc[i] = _row(chunk, old, spec, low, r, delta)[2]
    return out, lse, acc


def _row(
    chunk: Chunk, old: PackedTokens, spec: AttentionSpec, low: int, r: int, delta_loc: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`row_results` has it, of row ``r`` of a request whose first one is ``low`` behind the tokens ``old``."""
    prefix, seen = old.k.shape[0], r - low + 1
    visible = spec.visible(torch.arange(prefix + seen))
    row = chunk.q[r].to(torch.float64)
    new_k, new_v = (x[low : r + 1].to(torch.float64) for x in (chunk.k, chunk.v))
    c = product_radii(row, new_k, spec)[0] + softmax_error(spec)
    if prefix:
        digits = chunk.q.dtype != torch.float32
        before = old.key_radius(row, spec, delta_loc, max(visible.numel() - seen, 1), digits)
        c = torch.cat((before, c), dim=-1)
    rho = torch.cat((old.value_radius(), torch.zeros(new_v.shape[:2], dtype=torch.float64)))
    v = torch.cat((old.v, new_v))
    z = spec.logits(row, torch.cat((old.k, new_k)))
    return row_results(z[:, visible], c[:, visible], v[visible], rho[visible], spec.sinks)
