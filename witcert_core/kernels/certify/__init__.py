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
from witcert_core.kernels.certify.cpu import certify_cpu
from witcert_core.kernels.certify.launch import launch_certify
from witcert_core.kernels.certify.reference import certify_reference
from witcert_core.kernels.device.arguments import Rows
from witcert_core.kernels.host import checks
from witcert_core.kernels.host.arguments import attention_spec
from witcert_core.kernels.host.dispatch import check_compute_dtype, resolve
from witcert_core.kernels.host.pages import PagedKV, PageTable, check_paged, check_side
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


def certify(
    q: Tensor,
    paged_kv_cache: PagedKV,
    witness: Tensor,
    table: PageTable,
    bands: BandMap,
    *,
    max_kv_len: int,
    row_request: Tensor,
    row_position: Tensor,
    value_witness: Tensor | None = None,
    steps: Tensor | None = None,
    delta_loc: Tensor | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    arithmetic: KernelArithmetic | None = None,
    backend: str = "auto",
) -> Certificate:
    """Measure query rows against a pool that some other kernel attends.

    Args:
        q: ``[R, Hq, D]``; of the pool's dtype, or fp32, or any 16-bit dtype over an fp8 pool.
        paged_kv_cache: fp32, fp16, bf16 or fp8 ``[P, page_size, Hkv, D]`` and ``[P, page_size, Hkv, Dv]``.
        witness: uint8 ``[P, page_size, Hkv, B]``; 255 is unknown and makes the meter 1.
        row_request, row_position: int32 ``[R]``: row ``r`` sees the tokens of its request up to its position.
        value_witness: uint8 ``[P, page_size, Hkv, 1]``; without it the output fields are infinite and V is
            not read.
        steps: fp16 ``[P, page_size, Hkv, Gr]`` scales of ``int8_dither``, whose decoded keys the pool holds. The radius
            is then the probabilistic tier's plus the witness's, which is of what the pool's dtype added alone.
        delta_loc: fp32 ``[R]`` probability a cell may spend on them; absent or 0: half steps.
        arithmetic: of the engine's kernel; by default the least exact one that the dtypes of q and the pool allow.

    The remaining arguments are those of :func:`~witcert_core.kernels.decode.decode_int8`.

    Raises:
        InputError: shapes, strides or dtypes that do not fit together.
        UnsupportedError: queries that would round the pool's keys, or a device that cannot compute with its dtype.
    """
    check_paged(paged_kv_cache)
    k, v = paged_kv_cache
    _check(q, k, witness, value_witness, bands, row_request, row_position, steps, delta_loc)
    if steps is not None and delta_loc is None:
        delta_loc = torch.zeros(q.shape[0], dtype=torch.float32, device=q.device)
    spec = attention_spec(q, sm_scale, logits_soft_cap, window_left, sinks, arithmetic)
    constant = spec.kernel(q.dtype, k.dtype, v.dtype).cast_radius
    backend = resolve(backend, q.device)
    if backend == "reference":
        rows = list(zip(row_request.tolist(), row_position.tolist(), strict=True))
        found = certify_reference(q, k, v, witness, value_witness, table, bands, rows, spec, constant, steps, delta_loc)
        return Certificate(*(x.to(torch.float32) for x in found))

    check_compute_dtype(q.dtype, backend)
    shape = q.shape[:2]
    acc = torch.full((*shape, NUM_ACC_FIELDS), float("inf"), dtype=torch.float32, device=q.device)
    omega, lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    band = checks.band_on(bands.channel_band, q.device)
    if backend == "cpu":
        sides = (witness, value_witness, band, bands.num_bands, steps, delta_loc, table)
        certify_cpu(q, k, v, *sides, row_request, row_position, spec, constant, acc, omega, lse)
        return Certificate(acc, omega, lse)
    launch_certify(
        q,
        k,
        v,
        witness,
        value_witness,
        band,
        bands.num_bands,
        steps,
        delta_loc,
        table,
        Rows(row_request, row_position, row_position + 1),
        spec,
        constant,
        checks.splits_for(max_kv_len),
        acc,
        omega,
        lse,
    )
    return Certificate(acc, omega, lse)


def _check(
    q: Tensor,
    k: Tensor,
    witness: Tensor,
    value_witness: Tensor | None,
    bands: BandMap,
    row_request: Tensor,
    row_position: Tensor,
    steps: Tensor | None,
    delta_loc: Tensor | None,
) -> None:
    """Raise unless queries, pool and what stands beside it fit together."""
    kv_heads, head_dim = k.shape[2:]
    rows = row_request.numel()
    checks.check_queries(q, head_dim, kv_heads, rows)
    check_side("witness", witness, k, bands.num_bands, torch.uint8)
    if value_witness is not None:
        check_side("value_witness", value_witness, k, 1, torch.uint8)
    for name, ids in (("row_request", row_request), ("row_position", row_position)):
        checks.check_vector(name, ids, rows, torch.int32)
    if steps is not None:
        check_side("steps", steps, k, num_groups(head_dim), torch.float16)
    if delta_loc is not None and steps is None:
        raise InputError("delta_loc without steps; only dithered keys have a law to spend it on")
    checks.check_vector("delta_loc", delta_loc, rows, torch.float32)
    if bands.head_dim != head_dim:
        raise InputError(f"the band map is for {bands.head_dim} channels; K has {head_dim}")
    if not (q.dtype == k.dtype or q.dtype == torch.float32 or k.dtype in FP8):
        raise UnsupportedError(f"queries {q.dtype} over a pool of {k.dtype} would round keys; pass q as float32")
    if k.dtype == torch.float8_e4m3fn and k.is_cuda and torch.cuda.get_device_capability(k.device) < (8, 9):
        raise UnsupportedError("float8_e4m3fn pools need compute capability 8.9 or later; this device is older")


__all__ = ["Certificate", "certify"]
