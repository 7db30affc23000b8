"""Rows over an engine's own pages, summed up by the `certify` kernel.

The engine attends with its own kernel; this one reads the same keys and values and the witnesses beside them, and adds
how far the engine's weights can be from its own. Nothing is gathered where the pool has pages that kernels read, and a
kernel keeps the witnesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from witcert_core.cache.layer_witness import DitherSlots, LayerWitness, WitnessSlots
from witcert_core.cache.protocols import Pool
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.cache.write_queue import Write
from witcert_core.kernels.certify import FP8, certify
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.witness import record_witness
from witcert_core.serving.device.rows import QuantizedCounts, spend_down, token_pages, visible_tokens
from witcert_core.serving.device.sums import DeviceSums, output_norm
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.storage.attended import Attended


@runtime_checkable
class PagedPool(Pool, Protocol):
    """A pool whose tensors kernels can read."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All keys [P, N, Hkv, D] and values [P, N, Hkv, Dv] of a layer as attention reads them; None where no kernel
        can read them.

        Slot s is place s % N of page s // N, and a request fills whole pages one after the other.
        """
        ...


@dataclass(frozen=True)
class Rows:
    """The metered rows of one pass: the pages of their requests, the longest of max_kv_len tokens; request, position
    int32 [R]; slots [M] of all tokens of these requests, and the counts over them. deltas float32 [R]."""

    now: Pass
    table: PageTable
    max_kv_len: int
    request: Tensor
    position: Tensor
    slots: Tensor
    counts: QuantizedCounts
    deltas: Tensor
    nothing: Tensor


def _record(side: LayerWitness, write: Write) -> None:
    """The norms of what a write lost, in two launches: torch takes some thirty, which small passes wait to share."""
    if not isinstance(side, WitnessSlots):
        raise RuntimeError("the kernel records witnesses alone")
    record_witness(
        write.exact_k,
        write.exact_v,
        write.stored_k,
        write.stored_v,
        side.witness,
        side.value_witness,
        write.slots,
        side.bands,
    )


class KernelSums:
    """`Summer` on the device, over the pages of `pool` and the side tensors of `store`.

    gathers: the pool has no pages that kernels read; the tokens of metered requests are copied out of it.
    """

    def __init__(
        self,
        geometry: Geometry,
        pool: Pool,
        store: WitnessStore,
        layers: Sequence[int],
        form: str,
        *,
        gathers: bool = False,
    ) -> None:
        self.geometry = geometry
        self.pool = pool
        self.store = store
        self.form = form
        self.bands = store.bands
        self._rows: Rows | None = None
        self.gathers = gathers
        self.page_size = 1 if gathers or not layers else self._pages(layers[0])[0].shape[1]
        # A dithered cache in a 32-bit pool has no witness: its radius covers the storage already.
        shape = (geometry.num_slots, geometry.num_kv_heads, self.bands.num_bands)
        bare = any(store[layer].witness is None for layer in layers)
        self.no_witness = torch.zeros(shape, dtype=torch.uint8, device=geometry.device) if bare else None
        if not store.dithered:
            store.recorder = _record

    def sums(self, attended: Attended, now: Pass, deltas: Sequence[float]) -> DeviceSums:
        call, rows = attended.call, self._rows_of(now)
        k, v = self._read(call.layer, rows)
        side, spec = self.store[call.layer], call.spec
        witness = self.no_witness if side.witness is None else side.witness
        if witness is None:
            raise RuntimeError(f"layer {call.layer} lost its witnesses")
        q = call.q[now.tokens]
        arithmetic = spec.kernel(q.dtype, k.dtype, v.dtype)
        law: dict[str, Any] = {}
        if isinstance(side, DitherSlots):
            law = {"steps": self._paged(side.scales, rows), "delta_loc": rows.deltas if any(deltas) else rows.nothing}
        found = certify(
            q if q.dtype == k.dtype or k.dtype in FP8 else q.float(),
            (k, v),
            self._paged(witness, rows),
            rows.table,
            self.bands,
            max_kv_len=rows.max_kv_len,
            value_witness=self._paged(side.value_witness[..., None], rows),
            row_request=rows.request,
            row_position=rows.position,
            sm_scale=spec.sm_scale,
            window_left=spec.window_left,
            logits_soft_cap=spec.logits_soft_cap,
            sinks=None if spec.sinks is None else spec.sinks.float(),
            arithmetic=arithmetic,
            **law,
        )
        return DeviceSums(
            found.acc,
            output_norm(attended.heads[now.tokens]),
            found.omega,
            num_visible=visible_tokens(now.plan.rows, spec.window_left),
            num_quantized=rows.counts.of(side.exact_heads(rows.slots), spec.window_left),
            delta_loc=deltas,
            form=self.form,
            has_sink=spec.has_sink,
            v_dim=v.shape[-1],
            arithmetic=arithmetic,
        )

    def _rows_of(self, now: Pass) -> Rows:
        """The rows of a pass: the same in all its layers."""
        if self._rows is None or self._rows.now is not now:
            device, plan = now.device, now.plan
            read = plan.metered_requests()
            counts = torch.tensor([slots.numel() for slots in read])
            places = torch.arange(int(counts.sum())).split(counts.tolist()) if self.gathers else read
            table, longest = token_pages(places, device, self.page_size)

            def column(values: list[int]) -> Tensor:
                return torch.tensor(values, dtype=torch.int32).to(device)

            self._rows = Rows(
                now,
                table,
                longest,
                column([row.request for row in plan.rows]),
                column([row.position for row in plan.rows]),
                torch.cat(read),
                QuantizedCounts(read, plan.rows, device),
                spend_down(now.deltas, device),
                spend_down(now.nothing, device),
            )
        return self._rows

    def _read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values as the page table of `rows` names them, [P, N, Hkv, ...]."""
        if not self.gathers:
            return self._pages(layer)
        k, v = self.pool.read(layer, rows.slots)
        return k.contiguous()[:, None], v.contiguous()[:, None]

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        found = self.pool.pages(layer) if isinstance(self.pool, PagedPool) else None
        if found is None:
            raise RuntimeError(f"layer {layer}: the pool has no pages that kernels can read")
        return found

    def _paged(self, side: Tensor, rows: Rows) -> Tensor:
        """A side tensor [SLOTS, ...] as what `_read` gives, [P, N, ...]."""
        if self.gathers:
            return side[rows.slots][:, None]
        return side.view(-1, self.page_size, *side.shape[1:])
