"""The meter over any engine's pool: keys as its kernel reads them, the witness beside them, through its page
table.

Shapes: R query rows, Hq = G * Hkv query heads, D channels, B bands, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.certify.launch import certify_op
from witcert_core.kernels.certify.reference import certify_reference
from witcert_core.kernels.counters import counter_of
from witcert_core.kernels.host import dispatch, slack
from witcert_core.kernels.host.backend import check_compute_dtype, resolve
from witcert_core.kernels.host.pages import PagedKV, PageTable, check_side, split_cache
from witcert_core.meter.bounds import meter
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.meter.sums import NUM_ACC_FIELDS
from witcert_core.quantizers.dither import num_groups

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Certificate:
    """What :func:`certify` returns.

    Args:
        acc: fp32 ``[R, Hq, 16]``, of weights this kernel computed.
        omega: fp32 ``[R, Hq]`` largest logit distance between those weights' and the engine's arithmetic.
        lse: fp32 ``[R, Hq]``, base 2.
    """

    acc: Tensor
    omega: Tensor
    lse: Tensor

    def meter(self) -> tuple[Tensor, Tensor]:
        """Bound on TV of the **engine's** weights, float64 ``[R, Hq]``, and the deciding form.

        By the triangle inequality the engine's own kernel adds at most ``tanh(omega / 2)``.
        """
        value, form = meter(self.acc)
        extra = torch.tanh(0.5 * self.omega.to(torch.float64)).nan_to_num(nan=1.0)
        return (value + extra * (1.0 + 2.0**-20)).clamp(max=1.0), form


def certify(
    q: Tensor,
    paged_kv_cache: PagedKV,
    witness: Tensor,
    table: PageTable,
    bands: BandMap,
    *,
    max_kv_len: int,
    value_witness: Tensor | None = None,
    steps: Tensor | None = None,
    delta_loc: Tensor | None = None,
    row_request: Tensor | None = None,
    row_position: Tensor | None = None,
    q_len: int = 1,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    arithmetic: KernelArithmetic | None = None,
    flag: Tensor | None = None,
    counters: Tensor | None = None,
    layer: int = 0,
    part_m: Tensor | None = None,
    backend: str = "auto",
) -> Certificate:
    """Measure query rows against a pool that some other kernel attends.

    Args:
        q: ``[R, Hq, D]``; of the pool's dtype, or fp32, or any 16-bit dtype over an fp8 pool.
        paged_kv_cache: fp32, fp16, bf16 or fp8 pool, NHD or HND, a pair of 4-D or one 5-D tensor.
        witness: uint8 ``[P, page_size, Hkv, B]``; 255 is unknown and makes the meter 1.
        value_witness: uint8 ``[P, page_size, Hkv, 1]``; without it the output fields are infinite and V is
            not read.
        steps: fp16 ``[P, page_size, Hkv, Gr]`` scales of ``int8_dither``, whose decoded keys the pool holds. The radius
            is then the probabilistic tier's plus the witness's, which is of what the pool's dtype added alone.
        delta_loc: fp32 ``[R]`` probability a cell may spend on them; absent or 0: half steps.
        row_request, row_position: int32 ``[R]``, for rows in any order (extend): row ``r`` sees the tokens of
            its request up to its position. Without them row ``b q_len + i`` is query ``i`` of request ``b``.
        k_scale, v_scale: what stored K and V are multiplied with; witnesses are in units of the stored
            numbers.
        arithmetic: of the engine's kernel; by default the least exact one that the dtypes of q and the pool allow.
        flag: int32 ``[1]`` on the device; 0 leaves everything untouched.
        counters: int64 ``[layers]``; entry ``layer`` grows by the number of cells measured.
        part_m: fp32 ``[R, Hq, splits, 16]`` scratch.

    The remaining arguments are those of :func:`~witcert_core.kernels.decode.decode_int8`.
    """
    k, v = split_cache(paged_kv_cache, kv_layout)
    kv_heads, head_dim, page_size = k.shape[2], k.shape[3], k.shape[1]
    rows_given = row_request is not None and row_position is not None
    if (row_request is None) != (row_position is None) or (rows_given and q_len != 1):
        raise InputError("row_request and row_position belong together, and exclude q_len > 1")
    rows = q.shape[0] if rows_given else table.batch_size * q_len
    dispatch.check_queries(q, head_dim, kv_heads, rows)
    heads = q.shape[1]
    check_side("witness", witness, k, bands.num_bands, torch.uint8)
    if value_witness is not None:
        check_side("value_witness", value_witness, k, 1, torch.uint8)
    for name, ids in (("row_request", row_request), ("row_position", row_position)):
        dispatch.check_vector(name, ids, rows, torch.int32)
    if steps is not None:
        check_side("steps", steps, k, num_groups(head_dim), torch.float16)
    if delta_loc is not None and steps is None:
        raise InputError("delta_loc without steps; only dithered keys have a law to spend it on")
    dispatch.check_vector("delta_loc", delta_loc, rows, torch.float32)
    if steps is not None and delta_loc is None:
        delta_loc = torch.zeros(rows, dtype=torch.float32, device=q.device)
    if bands.head_dim != head_dim:
        raise InputError(f"the band map is for {bands.head_dim} channels; K has {head_dim}")
    exact_cast = q.dtype == k.dtype or q.dtype == torch.float32 or k.dtype in FP8
    if not exact_cast:
        raise UnsupportedError(f"queries {q.dtype} over a pool of {k.dtype} would round keys; pass q as float32")
    if k.dtype == torch.float8_e4m3fn and k.is_cuda and torch.cuda.get_device_capability(k.device) < (8, 9):
        raise UnsupportedError("float8_e4m3fn pools need compute capability 8.9 or later; this device is older")
    scale = dispatch.default_scale(sm_scale, head_dim, k_scale)
    sinks = dispatch.kernel_float(sinks, "sinks", heads)
    slopes = dispatch.kernel_float(alibi_slopes, "alibi_slopes", heads)
    engine = arithmetic or KernelArithmetic.of(q.dtype, k.dtype, v.dtype)
    constant = engine.cast_radius
    values = v if value_witness is not None else None
    if resolve(backend, q.device) == "reference":
        result = certify_reference(
            q,
            k,
            values,
            witness,
            value_witness,
            table,
            bands,
            _positions(table, page_size, q_len, row_request, row_position),
            sm_scale=scale,
            v_scale=v_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            engine_constant=constant,
            sinks=sinks,
            alibi_slopes=slopes,
            steps=steps,
            delta_loc=delta_loc,
        )
        return Certificate(*(x.to(torch.float32) for x in result))
    check_compute_dtype(q.dtype)
    splits = dispatch.splits_for(max_kv_len)
    if part_m is None:
        part_m = torch.empty(rows, heads, splits, slack.META_FIELDS, dtype=torch.float32, device=q.device)
    if tuple(part_m.shape[:2]) != (rows, heads) or part_m.shape[2] < splits:
        raise InputError(f"part_m is {tuple(part_m.shape)}; it must be [{rows}, {heads}, >= {splits}, 16]")
    acc = torch.full((rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    omega = torch.full((rows, heads), float("inf"), dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    counter = counter_of(counters, layer, q.device)
    limit = None if row_position is None else row_position + 1
    certify_op(
        q,
        k,
        values,
        witness,
        value_witness,
        dispatch.band_on(bands.channel_band, q.device),
        steps,
        delta_loc,
        table.indptr,
        table.indices,
        table.last_page_len,
        row_request,
        row_position,
        limit,
        sinks,
        slopes,
        flag,
        acc,
        omega,
        lse,
        part_m,
        counter,
        bands.num_bands,
        scale,
        v_scale,
        logits_soft_cap,
        constant,
        window_left,
        q_len,
    )
    return Certificate(acc, omega, lse)


def _positions(
    table: PageTable, page_size: int, q_len: int, row_request: Tensor | None, row_position: Tensor | None
) -> list[tuple[int, int]]:
    if row_request is not None and row_position is not None:
        return list(zip(row_request.tolist(), row_position.tolist(), strict=True))
    lengths = table.lengths(page_size)
    return [(b, lengths[b] - q_len + i) for b in range(table.batch_size) for i in range(q_len)]


__all__ = ["Certificate", "certify"]
