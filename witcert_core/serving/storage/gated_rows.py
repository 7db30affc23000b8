"""The rows that a gate looks at: cells of several KV heads, and of several requests, from the same tensor operations.

A gate must know its cells before the next layer runs, and one look at one KV head of one request is some three hundred
operations on small tensors, whose number is what they cost. So all heads of all requests are looked at together, and
together again those of which a block is restored.

Shapes: N requests of R rows each, H heads a request (all KV heads or one), G query heads per KV head, C = R * G cells
of one KV head, K = N * H KV heads side by side, S tokens that the longest request sees, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.cache.protocols import Pool, SlotErrors
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.batching import RowBatch, batch_rows
from witcert_core.meter.cells import Terms, bounds_of
from witcert_core.meter.measure import AttendedCells, Tokens, attended, key_radii
from witcert_core.meter.output import relative_output_bound
from witcert_core.policy.gates import block_risk

MAX_TOGETHER = 2**22
"""Cells times tokens of all heads of a request up to which they are looked at together: 32 MiB a tensor in float64."""


@dataclass(frozen=True)
class LayerCall:
    """One attention call as the engine made it; exact_k [SLOTS, Hkv, D], for audits. Repairs write to the pool."""

    layer: int
    pool: Pool
    spec: AttentionSpec
    exact_k: Tensor | None = None


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in this pass: q [R, Hq, D], their positions, slots [S] of positions 0..S-1.

    delta_loc: failure probability each cell may spend. audited: bool [R]. outputs [R, Hq, Dv] the engine's, for audits.
    """

    request_id: str
    q: Tensor
    positions: Tensor
    slots: Tensor
    delta_loc: float
    audited: Tensor
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Looked:
    """One KV head of one request as its cache is now: C cells over S tokens in B blocks.

    meter, out_rel, out_least [C] and risk, value_risk float64 [B]: see `gates.GateState`. quantized int64 [C]: tokens
    that each cell sees and that are not exact. exact bool [S]: tokens with radius 0. repaired, available bool [B]:
    blocks that are exact, and that are or could be made so.
    """

    terms: Terms
    meter: Tensor
    out_rel: Tensor
    out_least: Tensor
    quantized: Tensor
    exact: Tensor
    risk: Tensor
    value_risk: Tensor
    repaired: Tensor
    available: Tensor


class GatedRows:
    """N requests of equally many rows over all KV heads, or over the one that is given."""

    def __init__(
        self,
        call: LayerCall,
        requests: Sequence[RequestRows],
        batch: RowBatch,
        side: SlotErrors,
        form: str,
        head: int | None = None,
    ) -> None:
        self.call, self.batch, self.form = call, batch, form
        self.requests = [requests[row] for row in batch.rows]
        self.side = side if head is None else side.head(head)
        k, v = call.pool.read(call.layer, batch.slots.flatten())
        kv_heads = k.shape[1]
        wanted = slice(None) if head is None else slice(head, head + 1)
        self.k, self.v = batch.heads(k[:, wanted]), batch.heads(v[:, wanted])  # [S, K, D] and [S, K, Dv], as stored
        rows = torch.stack([request.q for request in self.requests])
        self.num_rows, self.group = rows.shape[1], rows.shape[2] // kv_heads
        self.heads = self.k.shape[1] // len(self.requests)
        own = rows.view(len(rows), self.num_rows, kv_heads, self.group, -1)[:, :, wanted]
        self.q = own.transpose(1, 2).flatten(0, 3)  # [K * C, D]
        self.seen = self._seen()  # [N, R, S]
        by_head = self.seen[:, None, :, None].expand(-1, self.heads, -1, self.group, -1)
        self.unseen = ~by_head.flatten(0, 3)  # [K * C, S]
        self.spec = call.spec  # of the cells
        if call.spec.sinks is not None:
            sinks = call.spec.sinks.view(kv_heads, 1, self.group)[wanted].expand(-1, self.num_rows, -1)
            self.spec = replace(call.spec, sinks=sinks.flatten().repeat(len(self.requests)))

    def _seen(self) -> Tensor:
        device = self.batch.slots.device
        place = torch.arange(self.batch.slots.shape[0], device=device)
        positions = torch.stack([request.positions for request in self.requests]).to(device)[..., None]
        seen = place <= positions
        if self.call.spec.window_left >= 0:
            seen = seen & (place >= positions - self.call.spec.window_left)
        return seen

    def measure(self, deltas: list[float]) -> tuple[Terms, AttendedCells, Tensor]:
        """Of the K * C cells as the cache is now, each request spending its delta: terms, and radii [K * C, S]."""
        batch, q = self.batch, self.q.to(torch.float64).view(len(self.requests), -1, self.q.shape[-1])
        radius = key_radii(self.side, q, batch, None, abs(self.spec.sm_scale), deltas).masked_fill(self.unseen, 0.0)
        cells = attended(self.q, Tokens.of(batch, self.k, self.v, self.side), self.spec, self.unseen)
        return cells.terms(radius, self.form), cells, radius

    def look(self, deltas: list[float], block_size: int, has_copy: Callable[[Tensor], Tensor]) -> list[list[Looked]]:
        """What a gate is shown, by request and head. has_copy: bool [S] of slots [S], whose exact copies are there."""
        terms, cells, radius = self.measure(deltas)
        weights = torch.softmax(cells.logits, -1)
        # What a sketch says of weight that was moved.
        known = None if cells.stored is None else (weights - torch.softmax(cells.stored.logits, -1)).abs()
        bounds = bounds_of(terms, self.form, self.spec.has_sink)
        out_rel = relative_output_bound(bounds.out, terms.norm)
        out_least = relative_output_bound(terms.kernel_out, terms.norm)
        batch, flat = self.batch, self.batch.slots.flatten()
        place = torch.arange(len(batch.slots), device=flat.device)
        block_of, num_blocks = place // block_size, -(-len(place) // block_size)
        num_heads = self.k.shape[1]
        weights, radius = (x.view(num_heads, -1, len(place)) for x in (weights, radius))
        known = None if known is None else known.view(num_heads, -1, len(place))
        risk = block_risk(weights, radius, block_of, num_blocks, known)
        rho, exact = cells.rho, batch.heads(self.side.exact_heads(flat))
        copied = has_copy(flat).view(-1, len(self.requests)).repeat_interleave(self.heads, 1)
        if batch.seen is not None:  # a shorter request sees no token in the places filled up
            filled = ~batch.seen.repeat_interleave(self.heads, 1)
            rho, exact = rho.masked_fill(filled, 0.0), exact | filled
        norm = terms.norm.view(num_heads, -1).clamp(min=1e-300)
        by_value = (weights * rho.T[:, None] / norm[..., None]).nan_to_num(nan=float("inf")).sum(1)
        value_risk = _block_sums(by_value, block_of, num_blocks)
        repaired = _all_of(exact.T, block_of, num_blocks)
        available = _all_of((copied | exact).T, block_of, num_blocks)
        quantized = (~self.unseen.view(num_heads, -1, len(place)) & ~exact.T[:, None]).sum(-1).flatten()

        def of(number: int, tokens: int) -> Looked:
            blocks = -(-tokens // block_size)
            cells = self.cells(number)
            return Looked(
                terms.of(cells),
                bounds.meter[cells],
                out_rel[cells],
                out_least[cells],
                quantized[cells],
                exact[:tokens, number],
                *(x[number, :blocks] for x in (risk, value_risk, repaired, available)),
            )

        return [
            [of(i * self.heads + head, tokens) for head in range(self.heads)] for i, tokens in enumerate(batch.lengths)
        ]

    def cells(self, number: int) -> slice:
        """The cells of KV head `number` of the K side by side."""
        size = self.num_rows * self.group
        return slice(number * size, (number + 1) * size)


def together(
    call: LayerCall,
    requests: Sequence[RequestRows],
    side: SlotErrors,
    form: str,
    num_kv_heads: int,
    only: int | None = None,
) -> Iterator[tuple[list[int], range, GatedRows]]:
    """All KV heads of all requests, or the `only` one, in as few batches as memory allows.

    Gives the requests' numbers, the heads and their rows.
    """
    heads = range(num_kv_heads) if only is None else range(only, only + 1)
    by_rows: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        by_rows.setdefault(len(request.q), []).append(number)
    for numbers in by_rows.values():
        alike = [requests[n] for n in numbers]
        for batch in batch_rows([request.slots for request in alike], alike[0].q.numel()):
            whole = [numbers[row] for row in batch.rows]
            cells = alike[0].q[..., 0].numel() * len(batch.rows)
            if len(heads) > 1 and cells * len(batch.slots) <= MAX_TOGETHER:
                yield whole, heads, GatedRows(call, alike, batch, side, form)
                continue
            for head in heads:
                yield whole, range(head, head + 1), GatedRows(call, alike, batch, side, form, head)


def _block_sums(x: Tensor, block_of: Tensor, num_blocks: int) -> Tensor:
    """Sums over the tokens of each block, [K, B], of x [K, S]."""
    return x.new_zeros(len(x), num_blocks).index_add(1, block_of, x)


def _all_of(flags: Tensor, block_of: Tensor, num_blocks: int) -> Tensor:
    """bool [K, B]: whether every token of a block has its flag [K, S]."""
    return _block_sums((~flags).to(torch.int64), block_of, num_blocks) == 0
