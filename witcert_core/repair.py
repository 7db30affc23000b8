"""The gate at work: bound the rows of one request in one layer, restore exact blocks until the gate is content.

Shapes: R rows of one request, G query heads per KV head, C = R * G cells of one KV head, S tokens the last row sees,
Hkv KV heads, D head_dim, Dv v_head_dim. A block is `block_size` consecutive positions of one layer and KV head.

Nothing is inferred from a repair: after each one weights, radii and bounds are computed again from the cache as it is.
Repairs are persistent: the exact keys and values stay in the engine's cache, so a block is paged in at most once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from witcert_core.audit import Attended, Audit, compare_rows
from witcert_core.cells import Terms
from witcert_core.errors import PluginError
from witcert_core.gated_rows import GatedRows, LayerCall, Looked, RequestRows, terms_of, together
from witcert_core.gates import CellStatus, Gate, GateDecision, GateState
from witcert_core.kernel_error import KernelArithmetic
from witcert_core.layout import AccField
from witcert_core.meter import Summed
from witcert_core.shadow import ShadowStore
from witcert_core.side_by_side import side_by_side
from witcert_core.sides import Side, Sides
from witcert_core.tv import attention_logits


@dataclass
class Outcome:
    """What the gate did for one request in one layer.

    cells: the sums of its cells, all KV heads. outputs: KV head -> [R, G, Dv] in the query's dtype, for heads whose
    output must replace the engine's. status [R, H] int64 of `CellStatus`. witness_cells: the same cells under the
    deterministic radii, where `cells` used the dither law. gave_up: why some cell stayed above its target, if one did.
    """

    cells: Summed
    status: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)
    witness_cells: Summed | None = None
    repaired_blocks: int = 0
    repaired_bytes: int = 0
    gave_up: str = ""


class BlockRepairer:
    """Runs a repairing gate over the requests of a pass; one per process.

    Page-in bytes are counted per request over its life (`forget` ends it); of all layers together or, with
    `layers_apart`, of each layer by itself. Under the dither law they must be apart: a budget that layers share would
    let what one layer repairs, and so the queries above it, depend on the dither of those above.
    """

    def __init__(
        self,
        gate: Gate,
        store: Sides,
        shadow: ShadowStore,
        *,
        block_size: int,
        max_pagein_bytes: int | None,
        layers_apart: bool = False,
        form: str = "auto",
    ) -> None:
        self.gate = gate
        self.store = store
        self.shadow = shadow
        self.num_kv_heads = shadow.num_kv_heads
        self.block_size = block_size
        self.max_pagein_bytes = max_pagein_bytes
        self.form = form
        self.layers_apart = layers_apart
        self._moved: dict[str, Counter[int]] = defaultdict(Counter)  # request -> layer -> bytes
        self._touched: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def begin_pass(self) -> None:
        """Forget which slots were repaired in the pass before."""
        self._touched.clear()

    def forget(self, request_id: str) -> None:
        self._moved.pop(request_id, None)

    def bytes_left(self, request_id: str, layer: int) -> int | None:
        """What a request may still page in for `layer`; None for no limit."""
        if self.max_pagein_bytes is None:
            return None
        moved = self._moved[request_id]
        return self.max_pagein_bytes - (moved[layer] if self.layers_apart else moved.total())

    def run(
        self, call: LayerCall, requests: Sequence[RequestRows], finished: Callable[[int], None] | None = None
    ) -> list[Outcome]:
        """Bound, repair and bound again: all cells of the layer together, then each KV head that needs a repair.

        finished: called with the number of a request when the cache is as its rows have read it.
        """
        for rows in requests:
            self.shadow.touch(rows.slots)
        side = self.store[call.layer]
        looked: dict[tuple[int, int], Looked] = {}
        certain: dict[tuple[int, int], Terms] = {}
        num_kv_heads = self.num_kv_heads
        for numbers, heads, group in together(call, requests, side, self.form, num_kv_heads):
            deltas = [requests[number].delta_loc for number in numbers]
            found = group.look(deltas, self.block_size, self.shadow.has)
            places = [(number, head) for number in numbers for head in heads]
            looked |= dict(zip(places, (one for of_request in found for one in of_request), strict=True))
            if any(deltas):
                terms, *_ = group.terms([0.0] * len(deltas))
                certain |= {place: terms_of(terms, group.cells(i)) for i, place in enumerate(places)}
        outcomes = []
        for number, rows in enumerate(requests):
            parts = [
                self._run_head(call, rows, head, side, looked[number, head], certain.get((number, head)))
                for head in range(num_kv_heads)
            ]
            outcomes.append(self._outcome(call, rows, parts))
            if finished is not None:
                finished(number)
        return outcomes

    def _outcome(self, call: LayerCall, rows: RequestRows, heads: list[_HeadOutcome]) -> Outcome:
        audits = [head.audit for head in heads if head.audit is not None]
        certain = [head.certain for head in heads if head.certain is not None]
        has_sink = call.sinks is not None
        audit = None
        if audits:
            audit = Audit(torch.cat([x.tv for x in audits], 1), torch.cat([x.excess for x in audits], 1))
        quantized = _side_by_side([head.quantized for head in heads], len(rows.q))
        visible = rows.positions + 1 if call.window_left < 0 else (rows.positions + 1).clamp(max=call.window_left + 1)
        seen = visible, quantized
        return Outcome(
            cells=_merge([head.terms for head in heads], seen, rows.delta_loc, self.form, has_sink, audit),
            status=_side_by_side([head.status for head in heads], len(rows.q)),
            outputs={i: head.output for i, head in enumerate(heads) if head.output is not None},
            witness_cells=_merge(certain, seen, 0.0, self.form, has_sink, None) if rows.delta_loc > 0 else None,
            repaired_blocks=sum(head.blocks for head in heads),
            repaired_bytes=sum(head.bytes for head in heads),
            gave_up="; ".join(sorted({head.gave_up for head in heads if head.gave_up})),
        )

    def _run_head(
        self, call: LayerCall, rows: RequestRows, head: int, side: Side, now: Looked, certain: Terms | None
    ) -> _HeadOutcome:
        group: _HeadRows | None = None
        if self._restored_since(call, rows, head):  # by another request of this pass: what was looked at is no more
            group = _HeadRows(call, rows, side, self.form, head)
            now = self._look(group)
        first = now.meter
        blocks = moved = 0
        block_of = torch.arange(rows.slots.numel(), device=rows.slots.device) // self.block_size
        while True:
            decision = self.gate.decide(self._state(call, rows, now, first))
            if not isinstance(decision, GateDecision):
                raise PluginError(f"gate {self.gate.name!r} decided {decision!r}; decide must return a GateDecision")
            if decision.action != "repair" or decision.block is None:
                break
            places = (block_of == decision.block) & ~now.exact
            wanted = rows.slots[places]
            if not wanted.numel():
                raise PluginError(
                    f"gate {self.gate.name!r} wants block {decision.block} of {now.risk.numel()} repaired, which is "
                    "exact already or does not exist; it would ask for ever"
                )
            if group is None:
                group = _HeadRows(call, rows, side, self.form, head)
            self._restore(call, wanted, head, group, places)
            now = self._look(group)
            blocks += 1
            moved += wanted.numel() * self.shadow.bytes_per_token_head
            self._moved[rows.request_id][call.layer] += wanted.numel() * self.shadow.bytes_per_token_head
        # Also when another request of this pass restored a block that this one reads: the engine's output is older.
        stale = self._restored_since(call, rows, head)
        audited = call.exact_k is not None and bool(rows.audited.any())
        if group is None and (stale or audited):
            group = _HeadRows(call, rows, side, self.form, head)
        if group is not None and rows.delta_loc > 0:
            certain = group.terms([0.0])[0]
        status = decision.status.where(now.quantized > 0, CellStatus.EXACT)
        served = group.serve() if group is not None and stale else None
        audit = group.audit(served) if group is not None and audited else None
        if audit is not None:
            status = status.where(audit.excess.flatten().to(status.device).nan_to_num() <= 0, CellStatus.ABOVE_TARGET)
        return _HeadOutcome(
            terms=now.terms,
            certain=certain if rows.delta_loc > 0 else None,
            quantized=now.quantized,
            status=status,
            audit=audit,
            output=served,
            blocks=blocks,
            bytes=moved,
            gave_up=decision.reason,
        )

    def _look(self, group: GatedRows) -> Looked:
        (rows,) = group.requests
        ((now,),) = group.look([rows.delta_loc], self.block_size, self.shadow.has)
        return now

    def _state(self, call: LayerCall, rows: RequestRows, now: Looked, first: Tensor) -> GateState:
        reads = now.quantized > 0  # a cell that reads nothing quantized has nothing to repair
        return GateState(
            meter=now.meter.where(reads, 0.0),
            log_a=now.terms.acc[:, AccField.LOG_A].where(reads, 0.0),
            out_rel=now.out_rel.where(reads, 0.0),
            first_meter=first.where(reads, 0.0),
            block_risk=now.risk,
            repaired=now.repaired,
            available=now.available,
            block_bytes=self.block_size * self.shadow.bytes_per_token_head,
            bytes_left=self.bytes_left(rows.request_id, call.layer),
            value_risk=now.value_risk,
        )

    def _restored_since(self, call: LayerCall, rows: RequestRows, head: int) -> bool:
        """Whether a block that these rows read was restored in this pass."""
        return any(bool(torch.isin(slots, rows.slots).any()) for slots in self._touched.get((call.layer, head), ()))

    def _restore(self, call: LayerCall, slots: Tensor, head: int, group: _HeadRows, places: Tensor) -> None:
        k, v = self.shadow.get(call.layer, slots, head)
        call.pool.restore(call.layer, slots, head, k, v)
        group.k[places, 0], group.v[places, 0] = k.to(group.k), v.to(group.v)
        self.store[call.layer].head(head).mark_exact(slots)
        self._touched[call.layer, head].append(slots)


@dataclass
class _HeadOutcome:
    terms: Terms
    certain: Terms | None
    quantized: Tensor
    status: Tensor
    audit: Audit | None
    output: Tensor | None
    blocks: int
    bytes: int
    gave_up: str


class _HeadRows(GatedRows):
    """One KV head of one request, of which blocks are restored: R rows times G query heads."""

    def __init__(self, call: LayerCall, rows: RequestRows, side: Side, form: str, head: int) -> None:
        (batch,) = side_by_side([rows.slots], 1)
        super().__init__(call, [rows], batch, side, form, head)
        self.rows, self.head = rows, head

    def serve(self) -> Tensor:
        """Outputs [R, G, Dv] with the engine's arithmetic: its dtype, softmax in float32."""
        k, v = self.k, self.v
        logits = attention_logits(self.q.float(), k.float(), self.call.sm_scale, self.call.logits_soft_cap)
        logits = logits.masked_fill(self.unseen, float("-inf"))
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks[:, None].float()], -1)
        weights = torch.softmax(logits, -1)[:, : k.shape[0]]
        values = v[:, 0].float()
        known = values.isfinite()
        out = weights @ values.where(known, 0.0)
        if not bool(known.all()):  # 0 times what is no number would spoil the rows that do not see it as well
            out = out.masked_fill((~self.unseen).float() @ (~known).float() > 0, float("nan"))
        return out.to(self.rows.q.dtype).view(-1, self.group, out.shape[-1])

    def audit(self, served: Tensor | None) -> Audit | None:
        """What is handed on of this head, `served` [R, G, Dv] or else the engine's, beside what the cache holds now."""
        rows, call = self.rows, self.call
        if call.exact_k is None:
            return None
        own = slice(self.head * self.group, (self.head + 1) * self.group)
        sinks = None if self.sinks is None else self.sinks[: self.group]
        own_arithmetic = KernelArithmetic((), rows.q.dtype)  # that of `serve`
        made = rows.outputs[:, own] if served is None and rows.outputs is not None else served
        kept = call.exact_k[rows.slots, self.head][:, None]
        return compare_rows(
            rows.q[:, own],
            [None] * len(rows.q) if made is None else list(made),
            [seen.nonzero().flatten() for seen in self.seen[0]],
            lambda places: (self.k[places], self.v[places]),
            kept.__getitem__,
            rows.audited,
            Attended(call.sm_scale, call.logits_soft_cap, sinks, call.arithmetic if served is None else own_arithmetic),
        )


def _side_by_side(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Tensors [R * G, ...] of the KV heads as one [R, H, ...], query heads in order."""
    return torch.cat([part.reshape(num_rows, -1, *part.shape[1:]) for part in parts], 1)


def _merge(
    parts: Sequence[Terms],
    seen: tuple[Tensor, Tensor],
    delta_loc: float,
    form: str,
    has_sink: bool,
    audit: Audit | None,
) -> Summed:
    """The sums of all KV heads as one batch [R, H]; seen: tokens in view [R], and the quantized ones [R, H]."""
    num_rows = len(seen[0])
    terms = Terms(*(_side_by_side([getattr(part, f.name) for part in parts], num_rows) for f in fields(Terms)))
    spent = torch.full((num_rows,), delta_loc, dtype=torch.float64)
    return Summed(terms, form, has_sink, *seen, audit, spent)
