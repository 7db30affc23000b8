"""A packed INT8 cache with everything that is not in use poisoned, and what its exact keys would have
said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core.kernels.append import append_int8
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PageTable
from witcert_core.meter.tv import attention_logits, softmax_with_sink, total_variation
from witcert_core.quantizers.dither import DitherKey, num_groups

from .paged import in_layout, page_table, some_channels

KEY = DitherKey(seed=11, nonce=22)
LAYER = 3
NEVER_OURS = 0x7FFFFFF0


@dataclass
class Int8Case:
    """Requests of ``lengths`` tokens; the rest of the pool is poison."""

    lengths: tuple[int, ...]
    page_size: int
    head_dim: int
    group: int
    kv_heads: int
    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
    witness: Tensor
    pass_ids: Tensor
    exact_k: Tensor
    exact_v: Tensor
    table: PageTable
    head_ids: Tensor
    bypass: BypassedKeys | None

    def cache(self, layout: str) -> tuple[Tensor, Tensor]:
        """A copy of the codes in memory laid out as NHD, HND or one 5-D tensor."""
        return in_layout(self.k, self.v, layout)

    def rewrite(self) -> None:
        """Quantize the exact keys and values of every token into its slot."""
        for request, length in enumerate(self.lengths):
            slots = self.table.slots(request, length, self.page_size)
            page, offset = slots // self.page_size, slots % self.page_size
            append_int8(
                self.exact_k[page, offset],
                self.exact_v[page, offset],
                (self.k, self.v),
                self.k_scales,
                self.v_scales,
                self.pass_ids,
                layer=LAYER,
                head_ids=self.head_ids,
                dither_key=KEY,
                slot_mapping=slots,
                witness=self.witness,
                bypass=self.bypass,
                backend="reference",
            )

    def only(self, request: int) -> PageTable:
        """The page table of one request alone."""
        low, high = self.table.indptr[request : request + 2].tolist()
        return PageTable(
            torch.tensor([0, high - low], dtype=torch.int32),
            self.table.indices[low:high].contiguous(),
            self.table.last_page_len[request : request + 1].contiguous(),
        )

    def truth(self, q: Tensor, q_len: int, sm_scale: float, **options: Any) -> Tensor:
        """Float64 TV ``[R, Hq]`` of exact against stored keys; 0 for rows that see nothing."""
        from witcert_core.kernels.decode.reference import dequantize
        from witcert_core.quantizers.dither import dither_vectors

        window, cap = options.get("window_left", -1), options.get("logits_soft_cap", 0.0)
        sinks = options.get("sinks")
        out = torch.zeros(q.shape[:2], dtype=torch.float64)
        for r in range(q.shape[0]):
            request, step = divmod(r, q_len)
            position = self.lengths[request] - q_len + step
            first = max(position - window, 0) if window >= 0 else 0
            if position < 0:
                continue
            slots = self.table.slots(request, position + 1, self.page_size)[first:]
            page, offset = slots // self.page_size, slots % self.page_size
            ids = self.pass_ids[slots].to(torch.int64) & 0xFFFFFFFF
            u = dither_vectors(KEY, ids, LAYER, self.head_ids.tolist(), self.head_dim)
            stored = dequantize(self.k[page, offset], self.k_scales[page, offset], u)
            if self.bypass is not None:
                stored = self.bypass.put(stored, self.bypass.k[page, offset])
            weights = []
            for keys in (self.exact_k[page, offset].double(), stored):
                z = attention_logits(q[r].double(), keys, sm_scale, cap)
                weights.append(softmax_with_sink(z, sinks))
            out[r] = total_variation(*weights)
        return out


def make_case(
    lengths: tuple[int, ...],
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int = 1,
    mixed: bool = True,
    seed: int = 0,
    bypass_pairs: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Int8Case:
    """Random keys with scales that all differ, pages in random order, pass ids shared or mixed.

    With ``bypass_pairs``, so many channel pairs of each head are outliers and kept in ``dtype`` beside the codes.
    """
    g = torch.Generator().manual_seed(seed)
    table, total = page_table(lengths, page_size, g)
    shape = (total, page_size, kv_heads)
    spread = torch.rand(*shape, num_groups(head_dim), generator=g).mul(3).exp().repeat_interleave(32, dim=-1)
    exact_k = torch.randn(*shape, head_dim, generator=g) * spread[..., :head_dim] * 0.4
    exact_v = torch.randn(*shape, head_dim, generator=g) * spread[..., :head_dim]
    bypass = None
    if bypass_pairs:
        channels = some_channels(head_dim, kv_heads, bypass_pairs, g)
        bypass = BypassedKeys.allocate(channels, head_dim, total, page_size, dtype, exact_k.device)
        exact_k = torch.where(bypass.keep.bool(), exact_k, exact_k * 20.0)
        bypass.k.fill_(float("nan"))
    exact_k = exact_k.to(dtype)
    groups = num_groups(head_dim)
    case = Int8Case(
        lengths,
        page_size,
        head_dim,
        group,
        kv_heads,
        torch.full((*shape, head_dim), 113, dtype=torch.int8),
        torch.full((*shape, head_dim), -99, dtype=torch.int8),
        torch.full((*shape, groups), float("nan"), dtype=torch.float16),
        torch.full((*shape, groups), float("nan"), dtype=torch.float16),
        torch.full((*shape, groups), 255, dtype=torch.uint8),
        torch.full((total * page_size,), NEVER_OURS, dtype=torch.int32),
        exact_k,
        exact_v,
        table,
        torch.arange(kv_heads, dtype=torch.int32) + 5,
        bypass,
    )
    for request, length in enumerate(lengths):
        rows = torch.full((length,), 7 + request, dtype=torch.int32)
        if mixed:
            # The last third was generated token by token, with pass ids beyond 2^31 among them.
            own = torch.arange(length, dtype=torch.int32) - 2**31 + 1000
            rows = torch.where(torch.arange(length) >= length - length // 3, own, rows)
        case.pass_ids[case.table.slots(request, length, page_size)] = rows
    case.rewrite()
    return case


def queries(case: Int8Case, q_len: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = len(case.lengths) * q_len
    return torch.randn(rows, case.kv_heads * case.group, case.head_dim, generator=g).to(dtype)
