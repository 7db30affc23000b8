"""Calls whose launches ``static.py`` compiles: the operations themselves, over tensors on the CPU; nothing is launched.

So what is compiled has the arguments, options and specialisations of what a GPU would run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.kernels.append import append_int8
from witcert_core.kernels.certify import certify
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.extend import extend_int8
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.witness import record_witness
from witcert_core.quantizers.dither import DitherKey, num_groups
from witcert_core.quantizers.layout import KVLayout
from witcert_core.quantizers.rotary import RotarySpec

KV_HEADS, PAGE, LENGTH = 8, 16, 64
KEY = DitherKey(1, 2)
OPERATIONS = ("append", "certify", "decode", "extend", "witness")


@dataclass(frozen=True)
class Launch:
    """A kernel with what it would be launched with."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The launch of ``kernel`` (a function's name) that ``call`` makes first.

    Args:
        must_not_spill: whether a spill is an error.
        bytes_moved, floor: a token and KV head, counted from the kernel's own loads; and what it cannot do without.
    """

    name: str
    kernel: str
    call: Callable[[], object]
    must_not_spill: bool = False
    bytes_moved: int | None = None
    floor: int | None = None

    def launch(self, arch: int) -> Launch:
        """As on a GPU of that architecture."""
        with recording(arch) as launches:
            self.call()
        return next(found for found in launches if found.kernel.__name__ == self.kernel)


@contextmanager
def recording(arch: int) -> Iterator[list[Launch]]:
    """Launches of calls on CPU tensors, recorded instead of made."""
    found: list[Launch] = []

    def record(kernel: Any, _grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found.append(Launch(kernel, args, options))

    with ExitStack() as patches:
        for name in OPERATIONS:
            module = importlib.import_module(f"witcert_core.kernels.{name}")
            patches.enter_context(patch.object(module, "resolve", lambda *_: "triton"))
        decode = importlib.import_module("witcert_core.kernels.decode.launch")
        patches.enter_context(patch.object(decode, "is_old", lambda _: arch < 90))
        patches.enter_context(patch.object(dispatch, "launch", record))
        yield found


def page_table() -> PageTable:
    """Two requests of `LENGTH` tokens."""
    pages = LENGTH // PAGE
    indptr = torch.tensor([0, pages, 2 * pages], dtype=torch.int32)
    return PageTable(indptr, torch.arange(2 * pages, dtype=torch.int32), torch.full((2,), PAGE, dtype=torch.int32))


class Packed:
    """An INT8 cache of heads of `dim` channels, and what the operations take with it."""

    def __init__(self, dim: int, *, group: int = 4, dtype: torch.dtype = torch.bfloat16, bypass: int = 0) -> None:
        self.dim, self.group, self.dtype = dim, group, dtype
        self.table = page_table()
        shape = (self.table.indices.numel(), PAGE, KV_HEADS)
        codes = torch.zeros(*shape, dim, dtype=torch.int8), torch.zeros(*shape, dim, dtype=torch.int8)
        k_scales, v_scales = (torch.ones(*shape, num_groups(dim), dtype=torch.float16) for _ in range(2))
        self.sides = codes, k_scales, v_scales
        self.pass_ids = torch.ones(shape[0] * PAGE, dtype=torch.int32)
        self.witness = torch.zeros(*shape, num_groups(dim), dtype=torch.uint8)
        self.head_ids = torch.arange(KV_HEADS, dtype=torch.int32)
        self.bypass = None
        if bypass:
            channels = torch.arange(bypass).expand(KV_HEADS, bypass)
            self.bypass = BypassedKeys.allocate(channels, dim, shape[0], PAGE, dtype, torch.device("cpu"))
        self.common: dict[str, Any] = {"layer": 2, "head_ids": self.head_ids, "bypass": self.bypass}

    def heads(self, tokens: int, heads: int) -> Tensor:
        return torch.zeros(tokens, heads, self.dim, dtype=self.dtype)

    def decode(self, *, witness: bool = False, q_len: int = 1, **options: Any) -> object:
        q = self.heads(2 * q_len, KV_HEADS * self.group)
        tensors: tuple[Any, ...] = (q, *self.sides, self.table, self.pass_ids)
        side = self.witness if witness else None
        given = {**self.common, "key": KEY, "max_kv_len": LENGTH, "q_len": q_len, "witness": side, **options}
        return decode_int8(*tensors, **given)

    def extend(self, *, witness: bool = False, **options: Any) -> object:
        q, k, v = (self.heads(2 * 40, heads) for heads in (KV_HEADS * self.group, KV_HEADS, KV_HEADS))
        starts = torch.tensor([0, 40, 80], dtype=torch.int32)
        rows = torch.tensor([3, 50], dtype=torch.int32)
        limits = {"max_q_len": 40, "max_kv_len": LENGTH, "meter_rows": rows}
        given = {**self.common, "key": KEY, **limits, "witness": self.witness if witness else None, **options}
        return extend_int8(q, k, v, *self.sides, starts, self.table, self.pass_ids, **given)

    def append(self) -> None:
        k, v = (self.heads(40, KV_HEADS) for _ in range(2))
        where = {"dither_key": KEY, "slot_mapping": torch.arange(40), "witness": self.witness}
        given: dict[str, Any] = {**self.common, **where}
        append_int8(k, v, *self.sides, self.pass_ids, **given)


def certified(
    dim: int,
    pool: torch.dtype = torch.bfloat16,
    q: torch.dtype = torch.bfloat16,
    *,
    dithered: bool = False,
    **options: Any,
) -> object:
    """The meter over a pool of a dtype."""
    table, bands = page_table(), band_map(RotarySpec(dim))
    shape = (table.indices.numel(), PAGE, KV_HEADS)
    k, v = (torch.zeros(*shape, dim, dtype=pool) for _ in range(2))
    witness, values = (torch.zeros(*shape, n, dtype=torch.uint8) for n in (bands.num_bands, 1))
    rows: dict[str, Any] = {name: torch.zeros(3, dtype=torch.int32) for name in ("row_request", "row_position")}
    if dithered:
        options["steps"] = torch.ones(*shape, num_groups(dim), dtype=torch.float16)
    queries = torch.zeros(3, 4 * KV_HEADS, dim, dtype=q)
    return certify(queries, (k, v), witness, table, bands, max_kv_len=LENGTH, value_witness=values, **rows, **options)


def recorded(dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """The witness of tokens in a pool."""
    bands = band_map(RotarySpec(dim))
    k, v, stored_k, stored_v = (torch.zeros(40, KV_HEADS, dim, dtype=dtype) for _ in range(4))
    witness = torch.zeros(64, KV_HEADS, bands.num_bands, dtype=torch.uint8)
    value_witness = torch.zeros(64, KV_HEADS, dtype=torch.uint8)
    record_witness(k, v, stored_k, stored_v, witness, value_witness, torch.arange(40), bands)


def table_cases(dim: int) -> list[Case]:
    """What ``static.md`` lists: 8 KV heads with G = 4 (or 8), pages of 16, bf16 in and out."""
    floor = KVLayout(dim).bytes_per_token_head
    stored, spared = KVLayout(dim, stored_witness=True), KVLayout(dim, bypass_pairs=4)
    four, eight = Packed(dim), Packed(dim, group=8)

    def decode(name: str, call: Callable[[], object], size: int = floor) -> Case:
        # Beside the codes 4 bytes of pass id a token, shared by the heads that read it, and 4 of page index a page.
        return Case(name, "decode_split", call, True, size + 4, floor)

    return [
        decode("decode", lambda: four.decode(meter=False)),
        decode("decode+meter", four.decode),
        decode("decode+meter+witness", lambda: four.decode(witness=True), stored.bytes_per_token_head),
        decode("decode+meter+bypass", Packed(dim, bypass=8).decode, spared.bytes_per_token_head),
        decode("decode, G = 8", lambda: eight.decode(meter=False)),
        decode("decode+meter, G = 8", eight.decode),
        Case("merge", "merge_splits", four.decode),
        # Reads K and V in 16 bit and a slot and pass id a token; writes the packed form and a witness byte a group.
        Case("append", "append_kernel", four.append, False, 4 * dim + floor + num_groups(dim), floor),
        Case("record", "record_witness_kernel", lambda: recorded(dim)),
        # K and V in 16 bit, 16 band norms and one value norm.
        Case("certify", "certify_split", lambda: certified(dim), False, 4 * dim + 17, 4 * dim),
        Case("extend", "extend_attention", four.extend, True),
        Case("extend tail", "tail_split", four.extend, True),
    ]


def option_cases(dim: int) -> list[Case]:
    """Every kernel with all its options on, and in the dtypes the table leaves out."""
    seen: dict[str, Any] = {"window_left": 40, "logits_soft_cap": 30.0}
    full, single = Packed(dim, bypass=8), Packed(dim, dtype=torch.float32, bypass=8)
    sinks, flag = torch.zeros(4 * KV_HEADS), torch.ones(1, dtype=torch.int32)
    counted = {"flag": flag, "counters": torch.zeros(3, dtype=torch.int64), "sinks": sinks}

    def all_of(packed: Packed, **more: Any) -> Callable[[], object]:
        return lambda: packed.decode(witness=True, q_len=3, **seen, **counted, **more)

    def chunk(packed: Packed) -> Callable[[], object]:
        return lambda: packed.extend(witness=True, sinks=sinks, **seen)

    return [
        Case("decode, all options", "decode_split", all_of(full)),
        Case("decode, fp32", "decode_split", all_of(single)),
        Case("merge, all options", "merge_splits", all_of(full)),
        Case("merge, unmetered", "merge_splits", lambda: full.decode(meter=False, sinks=sinks)),
        Case("merge of a chunk", "merge_splits", chunk(full)),
        Case("merge of a certificate", "merge_splits", lambda: certified(dim, sinks=sinks, **seen)),
        Case("certify, all options", "certify_split", lambda: certified(dim, dithered=True, sinks=sinks, **seen)),
        Case("certify, fp8 pool", "certify_split", lambda: certified(dim, torch.float8_e5m2)),
        Case("certify, fp32 over fp16", "certify_split", lambda: certified(dim, torch.float16, torch.float32)),
        Case("rows of a chunk, all options", "decode_split", chunk(full)),
        Case("extend, all options", "extend_attention", chunk(full)),
        Case("extend, fp32", "extend_attention", chunk(single)),
        Case("extend tail, all options", "tail_split", chunk(full)),
        Case("extend tail, fp32", "tail_split", chunk(single)),
        Case("append, bypass and witness", "append_kernel", full.append),
        Case("record in fp32", "record_witness_kernel", lambda: recorded(dim, torch.float32)),
    ]
