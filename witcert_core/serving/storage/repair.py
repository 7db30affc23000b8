"""The gate at work: bound the rows of one request in one layer, restore exact blocks until the gate is content.

Shapes: R rows of one request, G query heads per KV head, C = R * G cells of one KV head, S tokens the last row sees,
Hkv KV heads, D head_dim, Dv v_head_dim. A block is `block_size` consecutive positions of one layer and KV head.

Nothing is inferred from a repair: after each one weights, radii and bounds are computed again from the cache as it is.
Repairs are persistent: the exact keys and values stay in the engine's cache, so a block is paged in at most once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.protocols import SlotErrors, StoredErrors
from witcert_core.errors import PluginError
from witcert_core.meter.audit import Audit, compare_rows
from witcert_core.meter.batching import batch_rows
from witcert_core.meter.cells import Terms
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.meter.measure import Summed
from witcert_core.meter.sums import AccField
from witcert_core.meter.tv import softmax_with_sink
from witcert_core.policy.gates import CellStatus, Gate, GateDecision, GateState
from witcert_core.serving.storage.gated_rows import GatedRows, LayerCall, Looked, RequestRows, together


@dataclass
class Outcome:
    """What the gate did for one request in one layer.

    cells: the sums of its cells, all KV heads. outputs: KV head -> [R, G, Dv] in the query's dtype, for heads whose
    output must replace the engine's. status [R, H] int64 of `CellStatus`. deterministic_cells: the same cells under the
    deterministic radii, where `cells` used the dither law. gave_up: why some cell stayed above its target, if one did.
    """

    cells: Summed
    status: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)
    deterministic_cells: Summed | None = None
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
        store: StoredErrors,
        copies: ExactCopies,
        *,
        block_size: int,
        max_pagein_bytes: int | None,
        layers_apart: bool = False,
        form: str = "auto",
    ) -> None:
        self.gate = gate
        self.store = store
        self.copies = copies
        self.num_kv_heads = copies.num_kv_heads
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

    def run(self, call: LayerCall, requests: Sequence[RequestRows]) -> list[Outcome]:
        """Bound, repair and bound again, round by round: all cells of the layer, then those of KV heads that read what
        was restored, until the gate is content with every head. The cells that come out are those of the cache as it
        then is.
        """
        for rows in requests:
            self.copies.touch(rows.slots)
        every = [(number, head) for number in range(len(requests)) for head in range(self.num_kv_heads)]
        heads = {place: _HeadState(now, now.meter) for place, now in self._look(call, requests, every)}
        slots = torch.cat([rows.slots for rows in requests])
        shared = torch.unique(slots).numel() < slots.numel()
        wanting = every
        while wanting:
            restored: dict[int, list[Tensor]] = defaultdict(list)  # in this round, by head
            chosen = []
            for number, head in wanting:
                rows = requests[number]
                if shared and _reads(rows, restored[head]):  # of what was looked at something is no more
                    continue
                block = self._decide(call, rows, head, heads[number, head])
                if block is not None:
                    restored[head].append(block)
                    chosen.append((number, head))
            # A look at many heads costs little more than one at one, so all are looked at again before any goes on.
            wanting = chosen if not shared else [at for at in every if _reads(requests[at[0]], restored[at[1]])]
            for place, now in self._look(call, requests, wanting):
                heads[place].now = now
        if any(rows.delta_loc > 0 for rows in requests):
            for place, terms in self._certain(call, requests):
                heads[place].certain = terms
        outcomes = []
        for number, rows in enumerate(requests):
            parts = [self._finish(call, rows, head, heads[number, head]) for head in range(self.num_kv_heads)]
            outcomes.append(self._outcome(call, rows, parts))
        return outcomes

    def _certain(self, call: LayerCall, requests: Sequence[RequestRows]) -> Iterator[tuple[tuple[int, int], Terms]]:
        """The terms of every KV head of every request, (number, head), under the deterministic radii."""
        side = self.store[call.layer]
        for numbers, of_heads, group in together(call, requests, side, self.form, self.num_kv_heads):
            terms, *_ = group.measure([0.0] * len(numbers))
            for i, place in enumerate((number, head) for number in numbers for head in of_heads):
                yield place, terms.of(group.cells(i))

    def _look(
        self, call: LayerCall, requests: Sequence[RequestRows], places: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], Looked]]:
        """What the gate is shown of the KV heads of some requests, (number, head), as the cache is now."""
        wanted, side = set(places), self.store[call.layer]
        numbers = sorted({number for number, _ in places})
        heads = sorted({head for _, head in places})
        only = heads[0] if len(heads) == 1 else None
        named = [requests[number] for number in numbers]
        for found, of_heads, group in together(call, named, side, self.form, self.num_kv_heads, only):
            deltas = [group_rows.delta_loc for group_rows in group.requests]
            for index, looks in zip(found, group.look(deltas, self.block_size, self.copies.has), strict=True):
                for head, now in zip(of_heads, looks, strict=True):
                    if (numbers[index], head) in wanted:
                        yield (numbers[index], head), now

    def _decide(self, call: LayerCall, rows: RequestRows, head: int, state: _HeadState) -> Tensor | None:
        """Ask the gate and do what it says: the slots of the block that was restored, None if it wants nothing more."""
        now = state.now
        state.decision = decision = self.gate.decide(self._state(call, rows, now, state.first))
        if not isinstance(decision, GateDecision):
            raise PluginError(f"gate {self.gate.name!r} decided {decision!r}; decide must return a GateDecision")
        if decision.action != "repair" or decision.block is None:
            return None
        first = decision.block * self.block_size
        places = torch.zeros_like(now.exact)
        places[first : first + self.block_size] = True
        wanted = rows.slots[places & ~now.exact] if first >= 0 else rows.slots[:0]
        if not wanted.numel():
            raise PluginError(
                f"gate {self.gate.name!r} wants block {decision.block} of {now.risk.numel()} repaired, which is "
                "exact already or does not exist; it would ask for ever"
            )
        k, v = self.copies.get(call.layer, wanted, head)
        call.pool.restore(call.layer, wanted, head, k, v)
        self.store[call.layer].head(head).mark_exact(wanted)
        self._touched[call.layer, head].append(wanted)
        moved = wanted.numel() * self.copies.bytes_per_token_head
        state.blocks += 1
        state.bytes += moved
        self._moved[rows.request_id][call.layer] += moved
        return wanted

    def _outcome(self, call: LayerCall, rows: RequestRows, heads: list[_HeadOutcome]) -> Outcome:
        audits = [head.audit for head in heads if head.audit is not None]
        certain = [head.certain for head in heads if head.certain is not None]
        has_sink, window_left = call.spec.has_sink, call.spec.window_left
        audit = None
        if audits:
            audit = Audit(torch.cat([x.tv for x in audits], 1), torch.cat([x.excess for x in audits], 1))
        quantized = _concat_heads([head.quantized for head in heads], len(rows.q))
        visible = rows.positions + 1 if window_left < 0 else (rows.positions + 1).clamp(max=window_left + 1)
        seen = visible, quantized
        return Outcome(
            cells=_merge([head.terms for head in heads], seen, rows.delta_loc, self.form, has_sink, audit),
            status=_concat_heads([head.status for head in heads], len(rows.q)),
            outputs={i: head.output for i, head in enumerate(heads) if head.output is not None},
            deterministic_cells=_merge(certain, seen, 0.0, self.form, has_sink, None) if rows.delta_loc > 0 else None,
            repaired_blocks=sum(head.blocks for head in heads),
            repaired_bytes=sum(head.bytes for head in heads),
            gave_up="; ".join(sorted({head.gave_up for head in heads if head.gave_up})),
        )

    def _finish(self, call: LayerCall, rows: RequestRows, head: int, state: _HeadState) -> _HeadOutcome:
        now, decision, side = state.now, state.decision, self.store[call.layer]
        if decision is None:
            raise RuntimeError(f"layer {call.layer}: the gate was not asked about head {head}")
        # Also when another request of this pass restored a block that this one reads: the engine's output is older.
        stale = _reads(rows, self._touched.get((call.layer, head), ()))
        audited = call.exact_k is not None and bool(rows.audited.any())
        group = _HeadRows(call, rows, side, self.form, head) if stale or audited else None
        status = decision.status.where(now.quantized > 0, CellStatus.EXACT)
        served = group.serve() if group is not None and stale else None
        audit = group.audit(served) if group is not None and audited else None
        if audit is not None:
            status = status.where(audit.excess.flatten().to(status.device).nan_to_num() <= 0, CellStatus.ABOVE_TARGET)
        return _HeadOutcome(
            terms=now.terms,
            certain=state.certain,
            quantized=now.quantized,
            status=status,
            audit=audit,
            output=served,
            blocks=state.blocks,
            bytes=state.bytes,
            gave_up=decision.reason,
        )

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
            block_bytes=self.block_size * self.copies.bytes_per_token_head,
            bytes_left=self.bytes_left(rows.request_id, call.layer),
            value_risk=now.value_risk,
            out_least=now.out_least.where(reads, 0.0),
        )


@dataclass
class _HeadState:
    """One KV head of one request while its blocks are restored.

    first: its meter before. certain: its terms under the deterministic radii, at the end. decision: the gate's last.
    """

    now: Looked
    first: Tensor
    certain: Terms | None = None
    decision: GateDecision | None = None
    blocks: int = 0
    bytes: int = 0


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

    def __init__(self, call: LayerCall, rows: RequestRows, side: SlotErrors, form: str, head: int) -> None:
        (batch,) = batch_rows([rows.slots], 1)
        super().__init__(call, [rows], batch, side, form, head)
        self.rows, self.head = rows, head

    def serve(self) -> Tensor:
        """Outputs [R, G, Dv] with the engine's arithmetic: its dtype, softmax in float32."""
        k, v = self.k, self.v
        logits = self.spec.logits(self.q.float(), k.float())
        logits = logits.masked_fill(self.unseen, float("-inf"))
        weights = softmax_with_sink(logits, self.spec.sinks)[:, : k.shape[0]]
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
        sinks = None if self.spec.sinks is None else self.spec.sinks[: self.group]
        arithmetic = call.spec.arithmetic if served is None else KernelArithmetic((), rows.q.dtype)  # that of `serve`
        made = rows.outputs[:, own] if served is None and rows.outputs is not None else served
        kept = call.exact_k[rows.slots, self.head][:, None]
        return compare_rows(
            rows.q[:, own],
            [None] * len(rows.q) if made is None else list(made),
            [seen.nonzero().flatten() for seen in self.seen[0]],
            lambda places: (self.k[places], self.v[places]),
            kept.__getitem__,
            rows.audited,
            replace(call.spec, sinks=sinks, arithmetic=arithmetic),
        )


def _reads(rows: RequestRows, blocks: Sequence[Tensor]) -> bool:
    """Whether the rows read a slot of one of the blocks."""
    return bool(blocks) and bool(torch.isin(rows.slots, torch.cat(list(blocks))).any())


def _concat_heads(parts: Sequence[Tensor], num_rows: int) -> Tensor:
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
    terms = Terms.joined(parts, lambda found: _concat_heads(found, num_rows))
    spent = torch.full((num_rows,), delta_loc, dtype=torch.float64)
    return Summed(terms, form, has_sink, *seen, audit, spent)
