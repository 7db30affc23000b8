"""Which query rows of a forward pass are metered, and which tokens each of them sees.

A *row* is one query token of one request. Rows that read the quantized cache are counted as seen; of these the ones
the stride selects are metered, the others are reported as unknown. A row of a first chunk under
`prefill_reads: chunk_exact` reads no quantized key and is not counted at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

MAX_TRACKED_REQUESTS = 65536


@dataclass
class RequestRows:
    """Running counts of one request: decode rows seen (they set the stride) and rows metered (they spend delta)."""

    decode_rows: int = 0
    metered: int = 0


@dataclass(frozen=True)
class MeteredRow:
    """One metered row: its request's index in the batch, its place in the flat query tensor and its position.

    ordinal: 1-based count of metered rows of the request, the `t` of the failure budget.
    """

    request: int
    token: int
    position: int
    ordinal: int
    audited: bool


@dataclass
class RowPlan:
    """The metered rows of one pass. `kv_indptr` [R + 1] and `kv_indices` list the slots each row sees, in order.

    requests[i] [S_i]: all slots of request i, its new_tokens[i] new ones last.
    """

    rows: list[MeteredRow]
    kv_indptr: Tensor
    kv_indices: Tensor
    requests: list[Tensor]
    new_tokens: list[int]
    unmetered: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([row.token for row in self.rows], dtype=torch.int64)

    def of_request(self, index: int) -> list[int]:
        """Numbers of the rows of request `index` of the batch; they follow one another, positions rising."""
        return [number for number, row in enumerate(self.rows) if row.request == index]

    def slots_of(self, number: int) -> Tensor:
        """The slots [S] that row `number` sees."""
        return self.kv_indices[int(self.kv_indptr[number]) : int(self.kv_indptr[number + 1])]

    @property
    def audited(self) -> Tensor:
        return torch.tensor([row.audited for row in self.rows], dtype=torch.bool)


class RowPlanner:
    """Plans every pass of one process; keeps the counts of the requests it has seen (the oldest are forgotten)."""

    def __init__(self, *, stride: int, max_rows: int, audit_every: int, stored_prefill: bool) -> None:
        self.stride = stride
        self.max_rows = max_rows
        self.audit_every = audit_every
        self.stored_prefill = stored_prefill
        self._requests: OrderedDict[str, RequestRows] = OrderedDict()

    def request(self, rid: str) -> RequestRows:
        rows = self._requests.pop(rid, None) or RequestRows()
        self._requests[rid] = rows
        if len(self._requests) > MAX_TRACKED_REQUESTS:
            self._requests.popitem(last=False)
        return rows

    def forget(self, rid: str) -> None:
        self._requests.pop(rid, None)

    def plan(self, batch: ForwardBatch, req_to_token: Tensor) -> RowPlan:
        """The plan of `batch`; req_to_token [REQUESTS, MAX_CONTEXT] maps a request's positions to slots."""
        rids = batch.rids or []
        picked: list[MeteredRow] = []
        unmetered: Counter[tuple[int, str]] = Counter()
        new_tokens = self._new_tokens(batch)
        requests: list[Tensor] = []
        token = 0
        for index, rid in enumerate(rids):
            seq_len, new = int(batch.seq_lens[index]), new_tokens[index]
            requests.append(req_to_token[int(batch.req_pool_indices[index]), :seq_len].to(torch.int64))
            prefix = seq_len - new
            counts = self.request(rid)
            if new == 1 and prefix > 0:
                wanted = [0] if counts.decode_rows % self.stride == 0 else []
                counts.decode_rows += 1
                if not wanted:
                    unmetered[index, "stride"] += 1
            elif prefix > 0 or self.stored_prefill:
                wanted = self._chunk_rows(new)
                if len(wanted) < new:
                    unmetered[index, "stride" if len(wanted) < self.max_rows else "max_rows"] += new - len(wanted)
            else:
                wanted = []
            for offset in wanted:
                counts.metered += 1
                audited = self.audit_every > 0 and (counts.metered - 1) % self.audit_every == 0
                picked.append(MeteredRow(index, token + offset, prefix + offset, counts.metered, audited))
            token += new
        seen = [requests[row.request][: row.position + 1] for row in picked]
        indptr = torch.zeros(len(picked) + 1, dtype=torch.int32)
        if seen:
            indptr[1:] = torch.tensor([s.numel() for s in seen]).cumsum(0)
        indices = torch.cat(seen) if seen else torch.zeros(0, dtype=torch.int64)
        return RowPlan(picked, indptr, indices, requests, new_tokens, unmetered)

    def _new_tokens(self, batch: ForwardBatch) -> list[int]:
        if batch.forward_mode.is_decode():
            return [1] * len(batch.rids or [])
        return [int(n) for n in batch.extend_seq_lens.tolist()]

    def _chunk_rows(self, new: int) -> list[int]:
        """Offsets in a chunk of `new` tokens: the last row, whose token is sampled, and every stride-th before it."""
        return sorted(range(new - 1, -1, -self.stride)[: self.max_rows])
