"""Correctness on the device at hand: fresh random inputs, poisoned outputs, float64 on the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.flashinfer_oracle import log_a
from witcert_core.cache.bands import BandMap, band_map
from witcert_core.cache.outliers import outlier_channels
from witcert_core.cache.radii import radius_witness
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.certify import certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PageTable, gather
from witcert_core.kernels.witness import record_witness
from witcert_core.meter.sums import AccField
from witcert_core.quantizers.dither import DitherKey, num_groups
from witcert_core.quantizers.rotary import RotarySpec

KEY = DitherKey(seed=1, nonce=2)
LAYER = 1
PAGE = 16
ROOM = 2.0**-10
"""Weights of the kernel and of float64 differ by the arithmetic that the radii hold."""


def error(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||``; NaN if anything is."""
    a, b = got.double().cpu(), want.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def outward(got: Tensor, want: Tensor) -> bool:
    """Every accumulator on its sound side of the reference, but for ``ROOM``: it speaks of the kernel's own weights."""
    a, b = got.double().cpu(), want.double().cpu()
    down = [AccField.P_H, AccField.RHO_MIN]
    up = [f for f in AccField if f not in down]
    above, below = a[..., up] * (1 + ROOM) >= b[..., up], a[..., down] <= b[..., down] * (1 + ROOM)
    return bool(above.all() and below.all())


def to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, PageTable):
        return PageTable(value.indptr.cpu(), value.indices.cpu(), value.last_page_len.cpu())
    if isinstance(value, BypassedKeys):
        return BypassedKeys(value.channels.cpu(), value.keep.cpu(), value.k.cpu())
    return tuple(to_cpu(x) for x in value) if isinstance(value, tuple) else value


def reference(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The float64 result on the CPU; queries widened so that nothing is rounded at the end."""
    return function(*map(to_cpu, arguments), **{k: to_cpu(v) for k, v in options.items()}, backend="reference")


def check_dtype(dtype: torch.dtype, lengths: tuple[int, ...], dim: int, device: torch.device) -> list[dict[str, Any]]:
    """Append, decode, extend, witness and certificate in one dtype; one row of findings each."""
    seed = int(torch.randint(2**31, (1,))) if device.type == "cuda" else 1
    g = torch.Generator(device=device).manual_seed(seed)
    kv_heads, group, batch = 2, 4, len(lengths)
    pages = [-(-n // PAGE) for n in lengths]
    total = sum(pages) + 3
    order = torch.randperm(total, generator=g, device=device).to(torch.int32)
    table = PageTable(
        torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32, device=device),
        order[: sum(pages)].contiguous(),
        torch.tensor([(n - 1) % PAGE + 1 for n in lengths], dtype=torch.int32, device=device),
    )
    shape = (total, PAGE, kv_heads)
    codes = [torch.full((*shape, dim), 99, dtype=torch.int8, device=device) for _ in range(2)]
    groups = num_groups(dim)
    scales = [torch.full((*shape, groups), float("nan"), dtype=torch.float16, device=device) for _ in range(2)]
    witness = torch.full((*shape, groups), 255, dtype=torch.uint8, device=device)
    pass_ids = torch.randint(1, 2**31 - 1, (total * PAGE,), generator=g, device=device).to(torch.int32)
    slots = torch.cat([table.slots(b, n, PAGE) for b, n in enumerate(lengths)])
    # Half of the tokens share a row, as a prompt chunk does.
    pass_ids[slots[: len(slots) // 2]] = 77
    k, v = (torch.randn(len(slots), kv_heads, dim, generator=g, device=device).to(dtype) for _ in range(2))
    head_ids = torch.arange(kv_heads, dtype=torch.int32, device=device)
    findings = []

    channels = outlier_channels(k, RotarySpec(dim), 4)
    bypass = BypassedKeys.allocate(channels, dim, total, PAGE, dtype, device)
    bypass.k.fill_(float("nan"))
    k = torch.where(bypass.keep.bool(), k, k * 8)
    plain = [x.clone() for x in (*codes, *scales, witness)]
    beside = to_cpu(bypass)
    write: dict[str, Any] = {"layer": LAYER, "head_ids": head_ids, "dither_key": KEY, "slot_mapping": slots}
    append_int8(k, v, (codes[0], codes[1]), scales[0], scales[1], pass_ids, witness=witness, bypass=bypass, **write)
    host = [to_cpu(x) for x in plain]
    options = {name: to_cpu(x) for name, x in write.items()}
    append_int8(
        k.cpu(),
        v.cpu(),
        (host[0], host[1]),
        host[2],
        host[3],
        pass_ids.cpu(),
        witness=host[4],
        bypass=beside,
        backend="reference",
        **options,
    )
    same = all(
        torch.equal(a.cpu().float().nan_to_num(nan=-9.0), b.float().nan_to_num(nan=-9.0))
        for a, b in zip((*codes, *scales, bypass.k), (*host[:4], beside.k), strict=True)
    )
    findings.append({"check": "append", "ok": same, "detail": "codes and scales equal" if same else "differ"})

    q = torch.randn(batch, kv_heads * group, dim, generator=g, device=device).to(dtype)
    common: dict[str, Any] = {"layer": LAYER, "head_ids": head_ids, "key": KEY, "witness": witness, "bypass": bypass}
    limit = max(lengths)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    pool = ((codes[0], codes[1]), scales[0], scales[1])
    out = torch.full_like(q, float("nan"))
    delta = torch.full((batch,), 1e-7, device=device)
    got = decode_int8(q, *pool, table, pass_ids, max_kv_len=limit, out=out, delta_loc=delta, **common)
    want = reference(decode_int8, (q, *pool, table, pass_ids), {**common, "max_kv_len": limit, "delta_loc": delta})
    findings.append(verdict("decode", error(got[0], want[0]), close, outward(got[2], want[2])))
    alone = decode_int8(
        q[:1],
        *pool,
        PageTable(table.indptr[:2].contiguous(), table.indices, table.last_page_len[:1].contiguous()),
        pass_ids,
        max_kv_len=limit,
        delta_loc=delta[:1],
        **common,
    )
    same = all(torch.equal(a[0], b[0]) for a, b in zip(got, alone, strict=True))
    findings.append({"check": "alone = in a batch", "ok": same, "detail": "bitwise" if same else "differs"})

    for name, q_len, more in (
        ("decode, three rows", 3, {}),
        ("decode, half steps", 1, {"bypass": None, "witness": None}),
    ):
        several = torch.randn(batch * q_len, kv_heads * group, dim, generator=g, device=device).to(dtype)
        varied: dict[str, Any] = {**common, "max_kv_len": limit, "q_len": q_len, **more}
        got = decode_int8(several, *pool, table, pass_ids, **varied)
        want = reference(decode_int8, (several, *pool, table, pass_ids), varied)
        findings.append(verdict(name, error(got[0], want[0]), close, outward(got[2], want[2])))

    chunk = 19
    q_new, k_new, v_new = (torch.randn(batch * chunk, h, dim, generator=g, device=device).to(dtype) for h in (8, 2, 2))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * chunk
    rows = torch.tensor([0, chunk - 1, batch * chunk - 1], dtype=torch.int32, device=device)
    chunked: dict[str, Any] = {**common, "max_q_len": chunk, "max_kv_len": limit, "meter_rows": rows}
    got = extend_int8(q_new, k_new, v_new, *pool, starts, table, pass_ids, **chunked)
    want = reference(extend_int8, (q_new, k_new, v_new, *pool, starts, table, pass_ids), chunked)
    findings.append(verdict("extend", error(got[0], want[0]), close, outward(got[2], want[2])))

    bands = band_map(RotarySpec(dim))
    exact = [torch.full((*shape, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    norms = torch.full((*shape, bands.num_bands), 255, dtype=torch.uint8, device=device)
    value_norms = torch.full((*shape, 1), 255, dtype=torch.uint8, device=device)
    noisy = [x.float() + 0.05 * torch.randn(x.shape, generator=g, device=device) for x in (k, v)]
    for pool16, x in zip(exact, noisy, strict=True):
        pool16.flatten(0, 1)[slots] = x.to(dtype)
    stored = [x.flatten(0, 1)[slots] for x in exact]
    sides = norms.flatten(0, 1), value_norms.flatten(0, 1)[..., 0]
    record_witness(k, v, stored[0], stored[1], *sides, slots, bands)
    certified: dict[str, Any] = {
        "max_kv_len": limit,
        "value_witness": value_norms,
        "row_request": torch.arange(batch, dtype=torch.int32, device=device),
        "row_position": torch.tensor(lengths, dtype=torch.int32, device=device) - 1,
    }
    mine = certify(q, (exact[0], exact[1]), norms, table, bands, **certified)
    theirs = reference(certify, (q, (exact[0], exact[1]), norms, table, bands), certified)
    findings.append(verdict("certify", error(mine.lse, theirs.lse), 1e-5, outward(mine.acc, theirs.acc)))
    if device.type == "cuda":
        cache = (exact[0], exact[1])
        findings.append(oracle(q, cache, table, norms, bands, lengths, mine.acc[..., AccField.LOG_A]))
    for finding in findings:
        finding |= {"dtype": str(dtype).removeprefix("torch."), "seed": seed}
    return findings


def oracle(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    table: PageTable,
    norms: Tensor,
    bands: BandMap,
    lengths: tuple[int, ...],
    found: Tensor,
) -> dict[str, Any]:
    """``log A`` of the certificate against FlashInfer's two passes, where that is installed."""
    sm_scale = q.shape[2] ** -0.5
    radii = [
        radius_witness(q[b].cpu(), gather(norms, table.slots(b, n, PAGE)).cpu(), bands, sm_scale)
        for b, n in enumerate(lengths)
    ]
    try:
        want = log_a(q, cache, table, torch.cat(radii, dim=1).T.float().contiguous().to(q.device), sm_scale)
    except (ImportError, AttributeError, TypeError, RuntimeError) as problem:
        return {"check": "FlashInfer's A", "ok": True, "detail": f"not run: {type(problem).__name__}: {problem}"[:120]}
    distance = float((found - want).abs().max())
    # The certificate's radii also hold its own arithmetic, so it lies above; bf16 and fast math move FlashInfer's.
    ok = bool((found >= want - 1e-3).all()) and distance < 2e-2
    return {"check": "FlashInfer's A", "ok": ok, "detail": f"log A within {distance:.1e}"}


def verdict(name: str, distance: float, limit: float, sound: bool) -> dict[str, Any]:
    detail = f"relative error {distance:.1e}, accumulators {'outward' if sound else 'NOT OUTWARD'}"
    return {"check": name, "ok": distance <= limit and sound, "detail": detail}
