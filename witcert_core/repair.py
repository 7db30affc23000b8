"""The gate at work: bound the rows of one request in one layer, restore exact blocks until the gate is content.

Shapes: R rows of one request, G query heads per KV head, C = R * G cells of one KV head, S tokens the last row sees,
Hkv KV heads, D head_dim, Dv v_head_dim. A block is `block_size` consecutive positions of one layer and KV head.

Nothing is inferred from a repair: after each one weights, radii and bounds are computed again from the cache as it is.
Repairs are persistent: the exact keys and values stay in the engine's cache, so a block is paged in at most once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from witcert_core.cells import Terms, bounds_of, kernel_radius, sum_terms, weight_underflow
from witcert_core.errors import PluginError
from witcert_core.gates import Gate, GateDecision, GateState, block_risk
from witcert_core.layout import AccField
from witcert_core.meter import CellBatch, cell_batch, centred, true_tv
from witcert_core.output import relative_output_bound
from witcert_core.pool import Pool
from witcert_core.shadow import ShadowStore
from witcert_core.sides import Side, Sides
from witcert_core.tv import attention_logits


@dataclass(frozen=True)
class LayerCall:
    """One attention call as the engine made it. The pool is written to by repairs.

    sinks [H] or None; window_left negative for no window. exact_k [SLOTS, Hkv, D], for audits.
    """

    layer: int
    pool: Pool
    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None
    exact_k: Tensor | None = None


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in this pass: q [R, H, D], their positions, slots [S] of positions 0..S-1.

    delta_loc: failure probability each cell may spend. audited: bool [R].
    """

    request_id: str
    q: Tensor
    positions: Tensor
    slots: Tensor
    delta_loc: float
    audited: Tensor


@dataclass
class Outcome:
    """What the gate did for one request in one layer.

    outputs: KV head -> [R, G, Dv] in the query's dtype, for heads whose output must replace the engine's.
    status [R, H] int64 of `CellStatus`. witness_cells: the same cells under the deterministic radii, where `cells` used
    the dither law. gave_up: why some cell stayed above its target, if one did.
    """

    cells: CellBatch
    status: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)
    witness_cells: CellBatch | None = None
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

    def run(self, call: LayerCall, rows: RequestRows) -> Outcome:
        """Bound, repair and bound again, KV head by KV head."""
        self.shadow.touch(rows.slots)
        k, v = call.pool.read(call.layer, rows.slots)
        heads = [self._run_head(call, rows, head, k, v) for head in range(k.shape[1])]
        has_sink = call.sinks is not None
        outcome = Outcome(
            cells=_merge([head.terms for head in heads], rows, rows.delta_loc, self.form, has_sink),
            status=_side_by_side([head.status for head in heads], len(rows.q)),
            outputs={i: head.output for i, head in enumerate(heads) if head.output is not None},
            repaired_blocks=sum(head.blocks for head in heads),
            repaired_bytes=sum(head.bytes for head in heads),
            gave_up="; ".join(sorted({head.gave_up for head in heads if head.gave_up})),
        )
        truths = [head.truth for head in heads if head.truth is not None]
        if truths:
            outcome.cells = replace(outcome.cells, tv_audit=torch.cat(truths, 1).cpu())
        if rows.delta_loc > 0:
            certain = [head.certain for head in heads if head.certain is not None]
            outcome.witness_cells = _merge(certain, rows, 0.0, self.form, has_sink)
        return outcome

    def _run_head(self, call: LayerCall, rows: RequestRows, head: int, k: Tensor, v: Tensor) -> _HeadOutcome:
        group = _HeadRows(call, rows, head, k, v, self.store[call.layer].head(head), self.form)
        first: Tensor | None = None
        blocks = moved = 0
        while True:
            now = group.evaluate(rows.delta_loc)
            terms = now.terms
            bounds = bounds_of(terms, self.form, call.sinks is not None)
            first = bounds.meter if first is None else first
            exact = group.side.is_exact(rows.slots)
            num_blocks = -(-rows.slots.numel() // self.block_size)
            block_of = torch.arange(rows.slots.numel(), device=rows.slots.device) // self.block_size
            state = GateState(
                meter=bounds.meter,
                log_a=terms.acc[:, AccField.LOG_A],
                out_rel=relative_output_bound(bounds.out, terms.norm),
                first_meter=first,
                block_risk=block_risk(now.weights, now.radius, block_of, num_blocks, now.known),
                repaired=_all_of(exact, block_of, num_blocks),
                available=_all_of(self.shadow.has(rows.slots) | exact, block_of, num_blocks),
                block_bytes=self.block_size * self.shadow.bytes_per_token_head,
                bytes_left=self.bytes_left(rows.request_id, call.layer),
                value_risk=group.value_risk(now.weights, terms.norm, block_of, num_blocks),
            )
            decision = self.gate.decide(state)
            if not isinstance(decision, GateDecision):
                raise PluginError(f"gate {self.gate.name!r} decided {decision!r}; decide must return a GateDecision")
            if decision.action != "repair" or decision.block is None:
                break
            places = (block_of == decision.block) & ~exact
            wanted = rows.slots[places]
            if not wanted.numel():
                raise PluginError(
                    f"gate {self.gate.name!r} wants block {decision.block} of {num_blocks} repaired, which is exact "
                    "already or does not exist; it would ask for ever"
                )
            self._restore(call, wanted, head, group, places)
            blocks += 1
            moved += wanted.numel() * self.shadow.bytes_per_token_head
            self._moved[rows.request_id][call.layer] += wanted.numel() * self.shadow.bytes_per_token_head
        # Also when another request of this pass restored a block that this one reads: the engine's output is older.
        stale = any(bool(torch.isin(slots, rows.slots).any()) for slots in self._touched[call.layer, head])
        return _HeadOutcome(
            terms=terms,
            certain=group.evaluate(0.0).terms if rows.delta_loc > 0 else None,
            status=decision.status,
            truth=group.truth(),
            output=group.serve() if stale else None,
            blocks=blocks,
            bytes=moved,
            gave_up=decision.reason,
        )

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
    status: Tensor
    truth: Tensor | None
    output: Tensor | None
    blocks: int
    bytes: int
    gave_up: str


@dataclass(frozen=True)
class _Evaluation:
    """Terms of C cells, their weights [C, S] and radii [C, S]; known [C, S]: weight a sketch says was moved."""

    terms: Terms
    weights: Tensor
    radius: Tensor
    known: Tensor | None


class _HeadRows:
    """The cells of one KV head: R rows times G query heads, over the S tokens the last row sees."""

    def __init__(
        self, call: LayerCall, rows: RequestRows, head: int, k: Tensor, v: Tensor, side: Side, form: str
    ) -> None:
        self.call, self.rows, self.head, self.side, self.form = call, rows, head, side, form
        num_rows, num_heads, dim = rows.q.shape
        self.group = num_heads // k.shape[1]
        self.k, self.v = (x[:, head : head + 1].clone() for x in (k, v))  # [S, 1, D] and [S, 1, Dv], as stored
        self.own = slice(head * self.group, (head + 1) * self.group)
        self.q = rows.q[:, self.own].reshape(num_rows * self.group, dim)
        place = torch.arange(rows.slots.numel(), device=rows.slots.device)
        positions = rows.positions.to(rows.slots.device)[:, None]
        seen = place[None] <= positions
        if call.window_left >= 0:
            seen &= place[None] >= positions - call.window_left
        self.seen = seen.repeat_interleave(self.group, 0)
        self.sinks = None if call.sinks is None else call.sinks[self.own].repeat(num_rows)

    def evaluate(self, delta_loc: float) -> _Evaluation:
        """The C cells from the cache as it is now."""
        call, q = self.call, self.q.to(torch.float64)
        k, v = self.k, self.v
        unseen = ~self.seen
        residuals = self.side.residuals(self.rows.slots)
        logits, centre_v, stored = centred(
            q, k, v.to(torch.float64), residuals, call.sm_scale, call.logits_soft_cap
        )
        logits = logits.masked_fill(unseen, float("-inf"))
        if stored is not None:
            stored = replace(stored, logits=stored.logits.masked_fill(unseen, float("-inf")))
        scale = abs(call.sm_scale)
        radius = self.side.key_radius(q, self.rows.slots, scale, delta_loc).masked_fill(unseen, 0.0)
        sixteen_bit = min(k.element_size(), self.q.element_size()) <= 2
        omega = kernel_radius(q, k, scale, call.logits_soft_cap, sixteen_bit).masked_fill(unseen, 0.0)
        rho = self.side.value_radius(self.rows.slots)
        lost = weight_underflow(len(k), k.dtype, self.q.dtype)
        terms = sum_terms(
            logits, radius, omega, centre_v, rho, sinks=self.sinks, form=self.form, underflow=lost, stored=stored
        )
        weights = torch.softmax(logits, -1)
        known = None if stored is None else (weights - torch.softmax(stored.logits, -1)).abs()
        return _Evaluation(terms, weights, radius, known)

    def value_risk(self, weights: Tensor, norm: Tensor, block_of: Tensor, num_blocks: int) -> Tensor:
        """``sum p~ rho / ||o~||`` per block, [N]."""
        risk = weights * self.side.value_radius(self.rows.slots).squeeze(-1) / norm.clamp(min=1e-300)[:, None]
        total = torch.zeros(num_blocks, dtype=torch.float64, device=risk.device)
        return total.index_add(0, block_of, risk.nan_to_num(nan=float("inf")).sum(0))

    def serve(self) -> Tensor:
        """Outputs [R, G, Dv] with the engine's arithmetic: its dtype, softmax in float32."""
        k, v = self.k, self.v
        logits = attention_logits(self.q.float(), k.float(), self.call.sm_scale, self.call.logits_soft_cap)
        logits = logits.masked_fill(~self.seen, float("-inf"))
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks[:, None].float()], -1)
        weights = torch.softmax(logits, -1)[:, : k.shape[0]]
        values = v[:, 0].float()
        known = values.isfinite()
        out = weights @ values.where(known, 0.0)
        if not bool(known.all()):  # 0 times what is no number would spoil the rows that do not see it as well
            out = out.masked_fill(self.seen.float() @ (~known).float() > 0, float("nan"))
        return out.to(self.rows.q.dtype).view(-1, self.group, out.shape[-1])

    def truth(self) -> Tensor | None:
        """True TV [R, G], NaN in rows that are not audited; None without exact keys."""
        if self.call.exact_k is None or not bool(self.rows.audited.any()):
            return None
        shape = len(self.rows.q), self.group
        found = torch.full(shape, float("nan"), dtype=torch.float64, device=self.q.device)
        exact = self.call.exact_k[self.rows.slots, self.head][:, None]
        for row in self.rows.audited.nonzero().flatten().tolist():
            seen = self.seen[row * self.group]
            sinks = None if self.sinks is None else self.sinks[: self.group]
            q = self.rows.q[row, self.own]
            found[row] = true_tv(q, self.k[seen], exact[seen], self.call.sm_scale, self.call.logits_soft_cap, sinks)
        return found


def _all_of(flags: Tensor, block_of: Tensor, num_blocks: int) -> Tensor:
    """bool [N]: whether every token of a block has its flag [S]."""
    lacking = torch.zeros(num_blocks, dtype=torch.int64, device=flags.device)
    lacking = lacking.index_add(0, block_of, (~flags).to(torch.int64))
    return lacking == 0


def _side_by_side(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Tensors [R * G, ...] of the KV heads as one [R, H, ...], query heads in order."""
    return torch.cat([part.reshape(num_rows, -1, *part.shape[1:]) for part in parts], 1)


def _merge(parts: Sequence[Terms], rows: RequestRows, delta_loc: float, form: str, has_sink: bool) -> CellBatch:
    """The cells of all KV heads as one batch [R, H]."""
    num_rows = len(rows.q)
    terms = Terms(*(_side_by_side([getattr(part, f.name) for part in parts], num_rows) for f in fields(Terms)))
    spent = torch.full((num_rows,), delta_loc, dtype=torch.float64)
    return cell_batch(terms, form, has_sink, rows.positions + 1, None, spent)
