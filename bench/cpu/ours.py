"""Our contestants: decode over the packed cache, the meter over a 16-bit pool, and writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cpu.case import PAGE, Call, Case, filled, generator, normal
from witcert_core.cache.bands import band_map
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.certify import certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.host.pages import PageTable
from witcert_core.quantizers.dither import DitherKey, num_groups
from witcert_core.quantizers.rotary import RotarySpec

KEY = DitherKey(seed=1, nonce=2)
DTYPE = torch.bfloat16
NEWEST = 32
"""Tokens of a request that were generated one by one, each with a dither of its own."""


def tables(case: Case) -> list[PageTable]:
    """The pages of every set."""
    indptr = torch.arange(case.batch + 1, dtype=torch.int32) * case.pages
    last = torch.full((case.batch,), PAGE, dtype=torch.int32)
    return [PageTable(indptr, ids.flatten().contiguous(), last) for ids in case.page_ids()]


def packed(case: Case) -> tuple[Call, Call]:
    """Decode with the meter on every row (the probabilistic tier), and without."""
    shape = (case.requests * case.pages, PAGE, case.kv_heads)

    def codes(n: int) -> Tensor:
        return torch.randint(-127, 128, (n,), generator=generator(), dtype=torch.int8)

    def scale(n: int) -> Tensor:
        return (torch.rand(n, generator=generator()) * 0.02 + 0.01).half()

    k, v = (filled((*shape, case.head_dim), codes) for _ in range(2))
    k_scales, v_scales = (filled((*shape, num_groups(case.head_dim)), scale) for _ in range(2))
    ids, own = case.page_ids(), tables(case)
    pass_ids = torch.full((shape[0] * PAGE,), 5, dtype=torch.int32)
    newest = ids[..., -NEWEST // PAGE :].flatten().long()
    pass_ids.view(-1, PAGE)[newest] = torch.arange(6, 6 + PAGE, dtype=torch.int32)
    q = case.queries(DTYPE)
    options: dict[str, Any] = {
        "layer": 3,
        "head_ids": torch.arange(case.kv_heads, dtype=torch.int32),
        "key": KEY,
        "max_kv_len": case.length,
        "delta_loc": torch.full((case.batch,), 1e-6),
        "out": torch.empty_like(q),
        "lse": torch.empty(q.shape[:2]),
        "acc": torch.empty(*q.shape[:2], 16),
        "backend": "cpu",
    }

    def attend(meter: bool) -> Call:
        return lambda s: decode_int8(q, (k, v), k_scales, v_scales, own[s], pass_ids, meter=meter, **options)

    return attend(True), attend(False)


def simulated(case: Case) -> Call:
    """The meter alone over a bfloat16 pool, which an engine's kernel attends beside it."""
    shape = (case.requests * case.pages, PAGE, case.kv_heads)
    k, v = (normal((*shape, case.head_dim), DTYPE) for _ in range(2))
    bands = band_map(RotarySpec(case.head_dim))

    def norms(n: int) -> Tensor:
        return torch.randint(0, 100, (n,), generator=generator(), dtype=torch.uint8)

    witness, value_witness = filled((*shape, bands.num_bands), norms), filled((*shape, 1), norms)
    q, own = case.queries(DTYPE), tables(case)
    rows = torch.arange(case.batch, dtype=torch.int32)
    position = torch.full((case.batch,), case.length - 1, dtype=torch.int32)

    def measure(s: int) -> object:
        return certify(
            q,
            (k, v),
            witness,
            own[s],
            bands,
            row_request=rows,
            row_position=position,
            max_kv_len=case.length,
            value_witness=value_witness,
            backend="cpu",
        )

    return measure


def writers(tokens: int, kv_heads: int, head_dim: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Append to the packed cache, and a plain copy of the same 16-bit keys and values to the same slots."""
    k, v = (torch.randn(tokens, kv_heads, head_dim, generator=generator()).to(DTYPE) for _ in range(2))
    pages = -(-tokens // PAGE)
    shape = (pages, PAGE, kv_heads)
    codes = [torch.empty(*shape, head_dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.empty(*shape, num_groups(head_dim), dtype=torch.float16) for _ in range(2)]
    slots = torch.randperm(pages * PAGE, generator=generator())[:tokens].contiguous()
    pass_ids = torch.full((pages * PAGE,), 9, dtype=torch.int32)
    head_ids = torch.arange(kv_heads, dtype=torch.int32)
    pools = [torch.empty(pages * PAGE, kv_heads, head_dim, dtype=DTYPE) for _ in range(2)]

    def append() -> None:
        append_int8(
            k,
            v,
            (codes[0], codes[1]),
            scales[0],
            scales[1],
            pass_ids,
            layer=3,
            head_ids=head_ids,
            dither_key=KEY,
            slot_mapping=slots,
            backend="cpu",
        )

    def copy() -> None:
        for pool, new in zip(pools, (k, v), strict=True):
            pool[slots] = new

    return append, copy
