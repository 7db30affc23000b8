"""Residual sketches for a sample of requests: bounds close to the truth for some, at a fixed number of bytes.

`meter.sketch_bits` keeps a sketch of every slot of the pool. Here a request is drawn when its first pass begins, and of
the tokens it writes 8-bit sketches of what quantization took away are kept in host memory, by slot and by the rules of
`sampled.py`. A metered row of which every token has one is bounded a second time with them; the ordinary bounds of
everybody stay as they are. The claim is deterministic, for any query.

New tokens are sketched from what their row reads, against what the model handed over: read exactly, they have no
residual. When the layer has attended, they are sketched again from what is stored, and once more where a quantizer
closes their group later.

Shapes: N tokens, S tokens a row sees, A rows, H query heads, Hkv local KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from witcert_core.cache.bands import band_map
from witcert_core.cache.capacity import choose_bands
from witcert_core.cache.copy_index import NO_COPY, CopyIndex
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.errors import UnsupportedError
from witcert_core.meter.audit import FormatError
from witcert_core.meter.measure import Summed, bound_cells, measure_rows
from witcert_core.meter.truth import SketchedBounds
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import Quantizer
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import Attends, ReadRow, ReadSlots, RequestPass, RowPlan
from witcert_core.serving.ranks import Ranks
from witcert_core.serving.sampled import RequestSample, SampledTokens, left_out, share_seed

SHARE_SKETCH_BITS = 8
STREAM = b"sketch"
"""Of the keyed draw, so that who is sketched does not follow from who is audited."""
PREFIX = "its prefix was computed by a request without sketches"
NO_ROOM = "no room for its sketches in meter.share_bytes"
EVICTED = "its sketches made room for another request's, or its slots were written again"
SAME_PASS = "its prefix was computed by another request of the same pass"


class SampledSketches(SampledTokens):
    """Sketches of the metered layers for the sample, and the bounds they allow; one per process.

    store: its "slots" are the copies of the index.
    """

    prefix, no_room, evicted = PREFIX, NO_ROOM, EVICTED

    def __init__(
        self, sample: RequestSample, index: CopyIndex, store: WitnessStore, layers: Sequence[int], form: str = "auto"
    ) -> None:
        super().__init__(sample, index, layers)
        self.store = store
        self.form = form
        self._new: AttentionCall | None = None  # the sample's new tokens of the layer that attends
        self._place = torch.zeros(index.num_copies, dtype=torch.int64)  # of a copy's token in it
        self._fresh = torch.zeros(index.num_copies, dtype=torch.bool)  # copies whose token is not sketched yet

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    def _claim(self, slots: Tensor) -> None:
        super()._claim(slots)
        copies = self.index.find(slots)
        for layer in self.store.layers:  # should the pass fail, what the copies said of other tokens must not be left
            self.store.mark_unknown(layer, copies[copies != NO_COPY])

    def plan(self, plan: RowPlan, requests: Sequence[RequestPass]) -> tuple[RowPlan, Counter[tuple[int, str]]]:
        """The plan with rows marked whose every token has a sketch; the sample's other rows, by request and reason."""
        whole = self.whole(requests)
        for i, why in whole.items():
            slots, new = requests[i].slots, requests[i].new_tokens
            others = [r.slots[-r.new_tokens :] for k, r in enumerate(requests) if k != i and r.new_tokens]
            # Whether these are read exactly or as stored, an engine's own kernel alone knows.
            if not why and others and bool(torch.isin(slots[: slots.numel() - new], torch.cat(others)).any()):
                whole[i] = SAME_PASS
        rows = [replace(row, sketched=not whole.get(row.request, "not drawn")) for row in plan.rows]
        return replace(plan, rows=rows, sketches=self), left_out(plan, whole)

    def put(self, call: AttentionCall) -> None:
        """Take the new tokens of one layer, as the model handed them over; before the layer attends."""
        self._new = None
        if not self._writes or call.layer not in self.layers:
            return
        copies = self.index.find(call.slots)
        kept = copies != NO_COPY
        if not bool(kept.any()):
            return
        mine = call.part(kept.to(call.slots.device))
        # Copies: engines change the tensors of a pass in place.
        self._new = replace(mine, exact_k=_copy(mine.exact_k), exact_v=_copy(mine.exact_v), slots=copies[kept])
        self._place[copies[kept]] = torch.arange(int(kept.sum()))
        self._fresh.zero_()
        self._fresh[copies[kept]] = True

    def keep(self, call: AttentionCall, stored: ReadSlots) -> None:
        """Sketch the new tokens of one layer as they are stored; after the layer attended."""
        new, self._new = self._new, None
        if new is None:
            return
        slots = call.slots[(self.index.find(call.slots) != NO_COPY).to(call.slots.device)]
        stored_k, stored_v = stored(call.layer, slots)
        self._sketch(call.layer, new.slots, (new.exact_k, new.exact_v), (stored_k, stored_v))

    def rewritten(self, layer: int, slots: Tensor, exact: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        """`slots` [N] hold `stored` in the place of `exact`, (K [N, Hkv, D], V [N, Hkv, Dv]), from now on."""
        if not self._holds or layer not in self.layers:
            return
        copies = self.index.find(slots)
        kept = (copies != NO_COPY).to(slots.device)
        self._sketch(
            layer, copies[copies != NO_COPY], (exact[0][kept], exact[1][kept]), (stored[0][kept], stored[1][kept])
        )

    def _sketch(self, layer: int, copies: Tensor, exact: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        exact_k, exact_v, stored_k, stored_v = (_copy(x) for x in (*exact, *stored))
        self.store.write(layer, copies, exact_k=exact_k, exact_v=exact_v, stored_k=stored_k, stored_v=stored_v)

    def bound(
        self,
        how: Attends,
        queries: Tensor,
        plan: RowPlan,
        read: ReadRow,
        numbers: Sequence[int],
        format_error: FormatError | None = None,
    ) -> SketchedBounds | None:
        """Part of `Sketches`."""
        chosen = [number for number in numbers if plan.rows[number].sketched]
        if not chosen or how.layer not in self.layers:
            return None
        found = [self._sums(how, queries[n], plan.seen_by(n, how.spec), read(n), format_error) for n in chosen]
        return SketchedBounds(chosen, torch.cat([cells.meter for cells in bound_cells(found)]))

    def _sums(
        self, how: Attends, q: Tensor, slots: Tensor, read: tuple[Tensor, Tensor], format_error: FormatError | None
    ) -> Summed:
        """Of the row q [H, D] that read these keys and values in `slots` [S]."""
        k, v = read
        copies = self.index.find(slots)
        fresh = self._fresh[copies]
        if self._new is not None and bool(fresh.any()):
            place, here = self._place[copies[fresh]], fresh.to(k.device)
            exact = self._new.exact_k[place], self._new.exact_v[place]
            self._sketch(how.layer, copies[fresh], exact, (k[here], v[here]))
            self._fresh[copies[fresh]] = False

        by_slot = format_error
        by_place = None if by_slot is None else lambda row, places: by_slot(row, slots[places])
        return measure_rows(
            q[None],
            lambda places: (k[places], v[places]),
            [torch.arange(slots.numel(), device=k.device)],
            spec=how.spec,
            radii=self.store[how.layer].at(copies, k.device),
            delta_loc=[0.0],
            form=self.form,
            format_error=by_place,
        )


def _copy(x: Tensor) -> Tensor:
    """In memory of its own on the host, where the sketches are."""
    return x.detach().to("cpu", copy=True)


def sampled_sketches(policy: Policy, quantizer: Quantizer, geometry: Geometry, ranks: Ranks) -> SampledSketches | None:
    """Those that the policy asks for; UnsupportedError where `meter.share_bytes` has no room for a token."""
    meter = policy.meter
    if not meter.sketch_share:
        return None
    layers = meter.layers_of(geometry.layers)
    count = choose_bands(quantizer, geometry.rotary, geometry.v_head_dim, SHARE_SKETCH_BITS, meter.bands)

    def store(copies: int) -> WitnessStore:
        return WitnessStore(
            quantizer=quantizer,
            layers=layers,
            num_slots=copies,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            bands=band_map(geometry.rotary, count),
            storage_dtype=geometry.pool_dtype,
            sketch_bits=SHARE_SKETCH_BITS,
        )

    per_token = store(1).nbytes
    if meter.share_bytes < per_token:
        raise UnsupportedError(
            f"meter.share_bytes is {meter.share_bytes}; the sketches of one token of this model take {per_token} "
            "bytes: allow that, or set meter.sketch_share to 0"
        )
    index = CopyIndex(geometry.num_slots, meter.share_bytes // per_token)
    sample = RequestSample(meter.sketch_share, share_seed(policy, ranks), STREAM)
    return SampledSketches(sample, index, store(index.num_copies), layers, meter.form)
