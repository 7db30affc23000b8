"""A cache simulated in the engine's own 16-bit pool, its rows metered by the `certify` kernel over the page table.

The engine attends with its own kernel; this one reads the same keys and values and the witnesses beside them, and adds
how far the engine's weights can be from its own. Nothing is gathered, and a kernel keeps the witnesses. On a GPU, or on
a CPU under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from witcert_core.cache.layer_witness import DitherSlots, LayerWitness, WitnessSlots
from witcert_core.cache.protocols import Pool
from witcert_core.cache.write_queue import Write
from witcert_core.kernels.certify import FP8, certify
from witcert_core.kernels.host.dispatch import kernels_serve
from witcert_core.kernels.host.pages import PageTable
from witcert_core.kernels.witness import record_witness
from witcert_core.meter.audit import Audit, compare_rows
from witcert_core.meter.cells import CellBatch
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.cells import (
    certified_cells,
    output_norm,
    quantized_tokens,
    spend_down,
    token_pages,
    visible_tokens,
)
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage import measuring
from witcert_core.serving.storage.simulated import SimulatedCache


class PagedPool(Pool, Protocol):
    """A pool whose tensors kernels can read."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All keys [P, N, Hkv, D] and values [P, N, Hkv, Dv] of a layer as attention reads them; None where no kernel
        can read them.

        Slot s is place s % N of page s // N, and a request fills whole pages one after the other.
        """
        ...


def simulated_cache(policy: Policy, geometry: Geometry, pool: PagedPool, encoder: Encoder) -> SimulatedCache:
    """The simulated cache of this device: metered by `certify` where that can say all that the policy asks for."""
    if by_certify(policy, geometry, encoder, pool):
        return KernelSimulated(policy, geometry, pool, encoder)
    return SimulatedCache(policy, geometry, pool, encoder)


def by_certify(policy: Policy, geometry: Geometry, encoder: Encoder, pool: PagedPool) -> bool:
    """Whether kernels run where the cache lies, can read it, and know all that the policy asks for."""
    if not kernels_serve(geometry.device) or left_to_reference(policy, encoder):
        return False
    return all(pool.pages(layer) is not None for layer in policy.meter.layers_of(geometry.layers))


def left_to_reference(policy: Policy, encoder: Encoder) -> str:
    """What of a policy the kernel does not know, or ''."""
    if policy.repairs:
        return f"gate.kind {policy.gate.kind}"
    if policy.sketch_bits:
        return "meter.sketch_bits"
    if policy.meter.form == "extremal":
        return "meter.form extremal"
    return "a stored witness beside dithered codes" if encoder.quantizer.stored_witness else ""


@dataclass(frozen=True)
class Rows:
    """The metered rows of one pass: the pages of their requests, the longest of max_kv_len tokens; request, position
    int32 [R]; tokens int64 [R], their places in the pass."""

    plan: RowPlan
    table: PageTable
    max_kv_len: int
    request: Tensor
    position: Tensor
    tokens: Tensor


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


class KernelSimulated(SimulatedCache):
    """`SimulatedCache` with its rows measured on the device."""

    pool: PagedPool

    def __init__(self, policy: Policy, geometry: Geometry, pool: PagedPool, encoder: Encoder) -> None:
        super().__init__(policy, geometry, pool, encoder)
        self.bands = self.store.bands
        self._rows: Rows | None = None
        # A dithered cache in a 32-bit pool has no witness: its radius covers the storage already.
        self.page_size = self._pages(min(self.metered_layers))[0].shape[1] if self.metered_layers else 1
        shape = (geometry.num_slots, geometry.num_kv_heads, self.bands.num_bands)
        bare = any(self.store[layer].witness is None for layer in self.metered_layers)
        self.no_witness = torch.zeros(shape, dtype=torch.uint8, device=geometry.device) if bare else None
        if not self.store.dithered:
            self.store.recorder = _record

    def _measure(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor) -> None:
        if not plan.rows or call.layer not in self.metered_layers:
            return
        rows = self._rows_of(plan)
        heads = out.view(-1, self.geometry.num_qo_heads, self.geometry.v_head_dim)
        made = heads[rows.tokens]
        norm = output_norm(made)
        step.layers[call.layer] = self._cells(call, rows, deltas, norm, self._audit(call, plan, made))
        measuring.compare(
            step,
            plan,
            call,
            call.q[rows.tokens],
            lambda number: self.pool.read(call.layer, plan.seen_by(number, call.spec)),
        )
        if any(delta > 0 for delta in deltas):
            step.deterministic_layers[call.layer] = self._cells(call, rows, [0.0] * len(deltas), norm, None)

    def _rows_of(self, plan: RowPlan) -> Rows:
        """The rows of a pass: the same in all its layers."""
        if self._rows is None or self._rows.plan is not plan:
            device = torch.device(self.geometry.device)
            table, longest = token_pages(plan.metered_requests(), device, self.page_size)

            def column(values: list[int], dtype: torch.dtype) -> Tensor:
                return torch.tensor(values, dtype=dtype).to(device)

            self._rows = Rows(
                plan,
                table,
                longest,
                column([row.request for row in plan.rows], torch.int32),
                column([row.position for row in plan.rows], torch.int32),
                column([row.token for row in plan.rows], torch.int64),
            )
        return self._rows

    def _cells(
        self, call: AttentionCall, rows: Rows, deltas: list[float], norm: Tensor, audit: Audit | None
    ) -> CellBatch:
        k, v = self._pages(call.layer)
        side = self.store[call.layer]
        witness = self.no_witness if side.witness is None else side.witness
        if witness is None:
            raise RuntimeError(f"layer {call.layer} lost its witnesses")
        q = call.q[rows.tokens]
        spec = call.spec
        arithmetic = spec.kernel(q.dtype, k.dtype, v.dtype)
        law: dict[str, Any] = {}
        if isinstance(side, DitherSlots):
            law = {"steps": self._paged(side.scales), "delta_loc": spend_down(deltas, q.device)}
        found = certify(
            q if q.dtype == k.dtype or k.dtype in FP8 else q.float(),
            (k, v),
            self._paged(witness),
            rows.table,
            self.bands,
            max_kv_len=rows.max_kv_len,
            value_witness=self._paged(side.value_witness[..., None]),
            row_request=rows.request,
            row_position=rows.position,
            sm_scale=spec.sm_scale,
            window_left=spec.window_left,
            logits_soft_cap=spec.logits_soft_cap,
            sinks=None if spec.sinks is None else spec.sinks.float(),
            arithmetic=arithmetic,
            **law,
        )
        read = rows.plan.metered_requests()
        exact = side.exact_heads(torch.cat(read))
        counts = quantized_tokens(exact, read, rows.plan.rows, spec.window_left)
        return certified_cells(
            found,
            norm,
            num_visible=visible_tokens(rows.plan.rows, spec.window_left),
            num_quantized=counts.repeat_interleave(q.shape[1] // counts.shape[1], 1),
            delta_loc=deltas,
            form=self.policy.meter.form,
            has_sink=spec.has_sink,
            v_dim=v.shape[-1],
            arithmetic=arithmetic,
            audit=audit,
        )

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        found = self.pool.pages(layer)
        if found is None:
            raise RuntimeError(f"layer {layer}: the pool has no pages that kernels can read")
        return found

    def _paged(self, side: Tensor) -> Tensor:
        """A side tensor [SLOTS, ...] in the pool's pages, [P, N, ...]."""
        return side.view(-1, self.page_size, *side.shape[1:])

    def _audit(self, call: AttentionCall, plan: RowPlan, made: Tensor) -> Audit | None:
        """What the engine made [R, H, Dv] of the planned rows, where they are audited."""
        kept = self.store.exact_k.get(call.layer)
        if kept is None:
            return None
        return compare_rows(
            call.q[plan.tokens],
            list(made),
            [plan.seen_by(number, call.spec) for number in range(len(plan.rows))],
            functools.partial(self.pool.read, call.layer),
            kept.__getitem__,
            plan.audited,
            call.spec,
        )
