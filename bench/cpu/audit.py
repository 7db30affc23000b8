"""Hostile caches through the compiled kernels, every cell's bound against the truth in float64.

``python -m bench.cpu.audit [--cells 1000000] [--seed 0]`` writes nothing; it ends with 1 and the seed of the call where
a true value is above its bound. Half of the calls decode a packed cache, half measure a pool that holds what a foreign
quantizer would give back (``certify``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.certify import certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.reference import dequantize
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.witness import record_witness
from witcert_core.meter.bounds import meter
from witcert_core.meter.output import output_bound
from witcert_core.meter.tv import total_variation
from witcert_core.quantizers.dither import DitherKey, dither_vectors, num_groups
from witcert_core.quantizers.rotary import RotarySpec

KEY = DitherKey(seed=3, nonce=4)
LAYER, PAGE, KINDS = 2, 16, 9
DELTA = 1e-12
"""Of a cell of the probabilistic tier: none of a million may fail."""


@dataclass(frozen=True)
class Audit:
    """What was compared; `seeds` of the calls with a violation, shares of cells that a bound says something of."""

    cells: int = 0
    violations: int = 0
    seeds: tuple[int, ...] = ()
    bounded: int = 0
    tightest: float = 0.0
    """Largest true TV over its bound."""

    def __add__(self, other: Audit) -> Audit:
        return Audit(
            self.cells + other.cells,
            self.violations + other.violations,
            self.seeds + other.seeds,
            self.bounded + other.bounded,
            max(self.tightest, other.tightest),
        )


@dataclass(frozen=True)
class Requests:
    """B requests of S tokens and one query row each, what was handed over and what is stored, all float64.

    q ``[B, Hq, D]``; exact_k, stored_k ``[B, S, Hkv, D]``; exact_v, stored_v ``[B, S, Hkv, Dv]``.
    """

    q: Tensor
    exact_k: Tensor
    exact_v: Tensor
    stored_k: Tensor
    stored_v: Tensor
    window_left: int
    soft_cap: float
    sinks: Tensor | None

    def attended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[B, Hq, S(+1)]``, a sink's last, and outputs ``[B, Hq, Dv]``."""
        batch, length, kv_heads, dim = k.shape
        grouped = self.q.reshape(batch, kv_heads, -1, dim)
        z = torch.einsum("bkgd,bskd->bkgs", grouped, k).reshape(batch, -1, length) * dim**-0.5
        if self.soft_cap > 0.0:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        if self.window_left >= 0:
            z[..., : max(length - 1 - self.window_left, 0)] = float("-inf")
        if self.sinks is not None:
            z = torch.cat((z, self.sinks.to(z.dtype)[None, :, None].expand(batch, -1, 1)), dim=-1)
        p = torch.softmax(z, dim=-1)
        of_head = p[..., :length].reshape(batch, kv_heads, -1, length)
        return p, torch.einsum("bkgs,bskd->bkgd", of_head, v).reshape(batch, -1, v.shape[-1])

    def compare(self, tv_bound: Tensor, acc: Tensor, tv_of_acc: Tensor, seed: int) -> Audit:
        """Against bounds ``[B, Hq]`` on TV, and the outputs' that follow from ``acc [B, Hq, 16]``."""
        (p, exact), (p_stored, stored) = (
            self.attended(self.exact_k, self.exact_v),
            self.attended(self.stored_k, self.stored_v),
        )
        tv = total_variation(p, p_stored)
        out = output_bound(acc, tv_of_acc, stored.norm(dim=-1), self.sinks is not None)
        # What float64 itself is off by, in sums of weights and of values.
        bad = tv > tv_bound + 1e-12
        size = torch.maximum(self.exact_v.abs().amax(), self.stored_v.abs().amax())
        bad |= (exact - stored).norm(dim=-1) > out + 1e-11 * size
        bad |= ~tv.isfinite() & (tv_bound < 1.0)
        ratio = torch.where(tv_bound > 1e-9, tv / tv_bound, 0.0).nan_to_num(nan=0.0)
        found = int(bad.sum())
        return Audit(
            bad.numel(),
            found,
            (seed,) if found else (),
            int((tv_bound < 1.0).sum()),
            float(ratio[tv_bound < 1.0].amax()) if bool((tv_bound < 1.0).any()) else 0.0,
        )


def hostile(batch: int, length: int, heads: int, dim: int, g: torch.Generator) -> Tensor:
    """Vectors ``[batch, length, heads, dim]``, another kind every request."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g)

    x = torch.randn(batch, length, heads, dim, generator=g)
    for b in range(batch):
        kind = b % KINDS
        if kind == 1:  # outlier channels
            x[b, :, :, torch.randperm(dim, generator=g)[:3]] *= 300.0
        elif kind == 2:  # tokens that are nearly one
            x[b] = x[b, :1] + 1e-3 * x[b]
        elif kind == 3:  # tokens of very different size
            x[b] *= torch.exp2(uniform(length, 1, 1) * 30.0 - 22.0)
        elif kind == 4:  # little but zeros
            x[b] *= uniform(length, heads, dim) < 0.03
        elif kind == 5:  # on the boundaries of rounding
            x[b] = (torch.round(x[b] * 20.0) + 0.5) / 127.0
            x[b, ..., 0] = 1.0
        elif kind == 6:  # near what float16 can hold
            x[b] = x[b].sign() * (3e4 + 3e4 * uniform(length, heads, dim))
        elif kind == 7:  # one token above all others
            x[b, int(uniform(1) * length)] *= 30.0
        elif kind == 8:  # next to nothing
            x[b] *= 2.0**-20
    return x


def hostile_queries(batch: int, heads: int, dim: int, g: torch.Generator, along: Tensor) -> Tensor:
    """``[batch, Hq, D]`` of any size; some along ``along [batch, Hkv, D]``, which quantization was off by."""
    q = torch.randn(batch, heads, dim, generator=g)
    steered = along.repeat_interleave(heads // along.shape[1], dim=1)
    steered = steered / steered.norm(dim=-1, keepdim=True).clamp(min=1e-30) * dim**0.5
    pick = torch.randint(4, (batch, heads, 1), generator=g)
    q = torch.where(pick == 1, steered.to(q.dtype), q)
    q = torch.where(pick == 2, q * (torch.rand(q.shape, generator=g) < 2.0 / dim), q)
    return q * torch.exp2(torch.rand(batch, heads, 1, generator=g) * 12.0 - 8.0)


def number(g: torch.Generator, values: Sequence[Any]) -> Any:
    return values[int(torch.randint(len(values), (1,), generator=g))]


def audit_call(seed: int) -> Audit:
    """One call of a kernel, of a thousand cells or so."""
    g = torch.Generator().manual_seed(seed)
    dtype = number(g, (torch.float32, torch.float16, torch.bfloat16))
    length, dim = number(g, (1, 5, 63, 64, 65, 200)), number(g, (32, 64, 80, 128))
    kv_heads, group, batch = number(g, (1, 2)), number(g, (1, 2, 4, 5, 8)), 2 * KINDS
    heads, pages = kv_heads * group, -(-length // PAGE)
    table = PageTable(
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        torch.randperm(batch * pages, generator=g).to(torch.int32),
        torch.full((batch,), length - PAGE * (pages - 1), dtype=torch.int32),
    )
    slots = torch.stack([table.slots(b, length, PAGE) for b in range(batch)])
    exact_k, exact_v = (hostile(batch, length, kv_heads, dim, g).to(dtype) for _ in range(2))
    window, cap = number(g, (-1, -1, 40)), number(g, (0.0, 0.0, 20.0))
    sinks = torch.randn(heads, generator=g) if number(g, (False, False, True)) else None
    options: dict[str, Any] = {"window_left": window, "logits_soft_cap": cap, "sinks": sinks, "backend": "cpu"}
    k, v = exact_k.double(), exact_v.double()
    requests = Requests(k, k, v, k, v, window, cap, sinks)
    call = (_pool, _packed, _pool, _chunk)[seed % 4]
    return call(Case(seed, g, requests, (exact_k, exact_v), table, slots, heads, options))


@dataclass(frozen=True)
class Case:
    """What a call is given, drawn by its seed from `g`, which goes on with what is the call's own.

    exact: keys and values ``[B, S, Hkv, D]`` of the requests, in the slots ``[B, S]`` of the pages of `table`. heads:
    query heads. options: what all kernels take alike.
    """

    seed: int
    g: torch.Generator
    requests: Requests
    exact: tuple[Tensor, Tensor]
    table: PageTable
    slots: Tensor
    heads: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """A packed cache as kernels take it, and what it stands for: k, v float64 ``[B, S, Hkv, D]``."""

    tensors: tuple[tuple[Tensor, Tensor], Tensor, Tensor]
    pass_ids: Tensor
    common: dict[str, Any]
    k: Tensor
    v: Tensor


def _filled(g: torch.Generator, exact: tuple[Tensor, Tensor], slots: Tensor, pages: int) -> Packed:
    """Keys and values ``[B, S, Hkv, D]`` in the slots ``[B, S]``, some with a witness of K."""
    batch, length, kv_heads, dim = exact[0].shape
    shape = (pages, PAGE, kv_heads)
    codes = [torch.zeros(*shape, dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((*shape, num_groups(dim)), float("nan"), dtype=torch.float16) for _ in range(2)]
    witness = torch.full((*shape, num_groups(dim)), 255, dtype=torch.uint8) if number(g, (False, True)) else None
    pass_ids = torch.zeros(shape[0] * PAGE, dtype=torch.int32)
    # A prompt of one pass, then tokens one by one.
    own = torch.randint(1, 2**31 - 2, (batch, length), generator=g, dtype=torch.int32)
    pass_ids[slots] = torch.where(torch.arange(length) < length * 2 // 3, own[:, :1], own)
    head_ids = torch.arange(kv_heads, dtype=torch.int32) + 3
    common: dict[str, Any] = {"layer": LAYER, "head_ids": head_ids, "witness": witness, "backend": "cpu"}
    tensors = (codes[0], codes[1]), scales[0], scales[1]
    append_int8(
        exact[0].flatten(0, 1),
        exact[1].flatten(0, 1),
        *tensors,
        pass_ids,
        dither_key=KEY,
        slot_mapping=slots.flatten(),
        **common,
    )
    place = slots // PAGE, slots % PAGE
    ids = (pass_ids[slots].to(torch.int64) & 0xFFFFFFFF).flatten()
    u = dither_vectors(KEY, ids, LAYER, head_ids.tolist(), dim).view(batch, length, kv_heads, dim)
    stored_k = dequantize(codes[0][place], scales[0][place], u)
    stored_v = dequantize(codes[1][place], scales[1][place])
    return Packed(tensors, pass_ids, common, stored_k, stored_v)


def _asked(g: torch.Generator, packed: Packed, exact_k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries ``[B, Hq, D]`` that do not know the dither, and ``[B]`` to spend on its law; or that do, and nothing."""
    batch, length, kv_heads, dim = exact_k.shape
    likely = number(g, (False, True))
    token = torch.randint(max(length, 1), (1,), generator=g)
    along = torch.zeros(batch, kv_heads, dim)
    if length and not likely:
        along = (packed.k - exact_k.double())[:, token[0]]
    q = hostile_queries(batch, heads, dim, g, along).to(exact_k.dtype)
    return q, torch.full((batch,), DELTA if likely else 0.0)


def _packed(case: Case) -> Audit:
    """Append and decode; the deterministic tier, or queries that do not know the dither and the other one."""
    packed = _filled(case.g, case.exact, case.slots, int(case.table.indptr[-1]))
    q, delta = _asked(case.g, packed, case.exact[0], case.heads)
    _, _, acc = decode_int8(
        q,
        *packed.tensors,
        case.table,
        packed.pass_ids,
        key=KEY,
        max_kv_len=case.slots.shape[1],
        delta_loc=delta,
        **{**packed.common, **case.options},
    )
    tv = meter(acc)[0]
    requests = replace(case.requests, q=q.double(), stored_k=packed.k, stored_v=packed.v)
    return requests.compare(tv, acc, tv, case.seed)


def _chunk(case: Case) -> Audit:
    """Extend a packed prefix, of any length, by a chunk that is exact; its last row."""
    batch, length, _, dim = case.exact[0].shape
    new = min(number(case.g, (1, 2, 17, 70)), length)
    prefix = length - new
    pages = -(-prefix // PAGE)
    of_prefix = PageTable(
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        case.table.indices.view(batch, -1)[:, :pages].flatten().contiguous(),
        torch.full((batch,), prefix - PAGE * max(pages - 1, 0), dtype=torch.int32),
    )
    old = case.exact[0][:, :prefix], case.exact[1][:, :prefix]
    packed = _filled(case.g, old, case.slots[:, :prefix], int(case.table.indptr[-1]))
    mine, delta = _asked(case.g, packed, old[0], case.heads)
    q = torch.randn(batch, new, case.heads, dim, generator=case.g).to(mine.dtype)
    q[:, -1] = mine
    _, _, acc = extend_int8(
        q.flatten(0, 1),
        case.exact[0][:, prefix:].flatten(0, 1),
        case.exact[1][:, prefix:].flatten(0, 1),
        *packed.tensors,
        torch.arange(batch + 1, dtype=torch.int32) * new,
        of_prefix,
        packed.pass_ids,
        key=KEY,
        max_q_len=new,
        max_kv_len=max(prefix, 1),
        meter_rows=torch.arange(1, batch + 1, dtype=torch.int32) * new - 1,
        delta_loc=delta,
        **{**packed.common, **case.options},
    )
    tv = meter(acc)[0]
    k, v = (torch.cat((x, y[:, prefix:].double()), 1) for x, y in zip((packed.k, packed.v), case.exact, strict=True))
    return replace(case.requests, q=mine.double(), stored_k=k, stored_v=v).compare(tv, acc, tv, case.seed)


def _pool(case: Case) -> Audit:
    """Record and certify a pool of keys and values that are off by anything."""
    batch, length, kv_heads, dim = case.exact[0].shape
    bands = band_map(RotarySpec(dim))
    shape = (int(case.table.indptr[-1]), PAGE, kv_heads)
    place = case.slots // PAGE, case.slots % PAGE

    def off(x: Tensor) -> Tensor:
        by = torch.exp2(torch.rand(batch, length, 1, 1, generator=case.g) * 16.0 - 16.0)
        noise = torch.randn(x.shape, generator=case.g) * x.float().abs().amax(dim=-1, keepdim=True)
        return (x.float() + by * noise).clamp(-65504.0, 65504.0).to(x.dtype)

    stored = [off(x) for x in case.exact]
    pool = [torch.full((*shape, dim), float("nan"), dtype=x.dtype) for x in case.exact]
    for to, x in zip(pool, stored, strict=True):
        to[place] = x
    witness = torch.full((*shape, bands.num_bands), 255, dtype=torch.uint8)
    value_witness = torch.full((*shape, 1), 255, dtype=torch.uint8)
    sides = witness.flatten(0, 1), value_witness.flatten(0, 1)[..., 0]
    record_witness(
        case.exact[0].flatten(0, 1),
        case.exact[1].flatten(0, 1),
        stored[0].flatten(0, 1),
        stored[1].flatten(0, 1),
        *sides,
        case.slots.flatten(),
        bands,
        backend="cpu",
    )
    token = torch.randint(length, (1,), generator=case.g)
    along = (stored[0].double() - case.exact[0].double())[:, token[0]]
    q = hostile_queries(batch, case.heads, dim, case.g, along).to(case.exact[0].dtype)
    found = certify(
        q,
        (pool[0], pool[1]),
        witness,
        case.table,
        bands,
        max_kv_len=length,
        row_request=torch.arange(batch, dtype=torch.int32),
        row_position=torch.full((batch,), length - 1, dtype=torch.int32),
        value_witness=value_witness,
        **case.options,
    )
    tv = meter(found.acc)[0]
    requests = replace(case.requests, q=q.double(), stored_k=stored[0].double(), stored_v=stored[1].double())
    return requests.compare(tv, found.acc, tv, case.seed)


def audited(cells: int, seed: int = 0) -> Audit:
    """Calls until so many cells were compared."""
    total = Audit()
    while total.cells < cells:
        total += audit_call(seed)
        seed += 1
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    options = parser.parse_args(arguments)
    total = audited(options.cells, options.seed)
    print(
        f"{total.cells} cells, {total.violations} violations; {100 * total.bounded / total.cells:.0f} % have a bound "
        f"below 1; the tightest is {total.tightest:.3f} true"
    )
    for seed in total.seeds:
        print(f"violated: --seed {seed} --cells 1")
    return int(total.violations > 0)


if __name__ == "__main__":
    raise SystemExit(main())
