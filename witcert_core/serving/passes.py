"""Which query rows of a forward pass are metered, and which tokens each of them sees.

A *row* is one query token of one request. Rows that read the quantized cache are counted as seen; of these the ones
the stride selects are metered, the others are reported as unknown. A row of a first chunk under
`prefill_reads: chunk_exact` reads no quantized key and is not counted at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from witcert_core.policy.model import NEVER, Stride
from witcert_core.probes.watches import Watches
from witcert_core.report.claims import AFTER_ITS_ANSWER, NOT_FROM_ITS_START
from witcert_core.serving.forgotten import Forgotten

if TYPE_CHECKING:
    from witcert_core.meter.attention import AttentionSpec
    from witcert_core.meter.audit import FormatError
    from witcert_core.meter.truth import SketchedBounds, Truth

MAX_TRACKED_REQUESTS = 65536
DECOMPRESSED = "decompressed"
"""Rows of a prompt that read a latent cache multiplied out to keys and values of heads: what that rounds is in no
radius, so they are unknown."""
LOOKS = 2
"""Generated tokens after a chunk at which a prefix is looked at. SGLang exchanges the slots of a prompt for equal ones
when it has the chunk's result, and with its overlap scheduler the first generated token is under way by then."""
ReadRow = Callable[[int], tuple[Tensor, Tensor]]
"""Number of a row -> keys [S, Hkv, D] and values [S, Hkv, Dv] that attention read for it, its window applied."""


ReadSlots = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Layer and slots [N] -> keys [N, Hkv, D] and values [N, Hkv, Dv] that are stored there."""


class Attends(Protocol):
    """Which layer attends, and how."""

    @property
    def layer(self) -> int: ...

    @property
    def spec(self) -> AttentionSpec: ...


class Compares(Protocol):
    """Whoever has the exact keys and values of the audited rows."""

    def compare(self, how: Attends, rows: Tensor, plan: RowPlan, read: ReadRow, numbers: Sequence[int]) -> Truth | None:
        """The truth about those of the rows `numbers` that are audited; None if none is.

        rows [ROWS, H, D]: the queries of all rows of the plan.
        """
        ...


class Sketches(Protocol):
    """Whoever has residual sketches of every token of some rows."""

    def bound(
        self,
        how: Attends,
        queries: Tensor,
        plan: RowPlan,
        read: ReadRow,
        numbers: Sequence[int],
        format_error: FormatError | None = None,
    ) -> SketchedBounds | None:
        """Bounds on TV of those of the rows `numbers` that are sketched; None if none is.

        queries [ROWS, H, D]: of all rows of the plan. format_error: of `measure_rows`, by slot.
        """
        ...


@dataclass(frozen=True)
class RequestPass:
    """One request in a pass: slots [S] int64 of all its tokens in order of position, its `new_tokens` last ones new.

    prefilling: whether the new tokens are of its prompt. Where an engine does not say, a single token after others is
    taken for a generated one. attends_quantized: whether the new tokens read their quantized selves; by default
    generated ones do, and chunks under `prefill_reads: stored`. not_followed: why no row of the new tokens can be
    metered, though they read what is stored; such rows are unknown. drafts: how many of the last new tokens are guesses
    that this pass verifies, a chain: each reads those before it. The next pass writes anew where one was wrong.
    facts: what the engine says of the request, for probes (`fields.FACTS`).
    """

    request_id: str
    slots: Tensor
    new_tokens: int
    prefilling: bool | None = None
    attends_quantized: bool | None = None
    not_followed: str = ""
    drafts: int = 0
    facts: Mapping[str, str | int] = field(default_factory=dict)


@dataclass
class RowCounts:
    """Running counts of one request: decode rows seen (they set the stride) and rows metered (they spend delta).

    reached: tokens computed so far, prefix included. sampled_from: position of its first token that was sampled, None
    before that. decoded: passes with generated tokens since its last chunk. without_law: why only deterministic bounds
    are claimed for it, or ''. drafted: where the last pass ended, if it verified drafts; else 0. probed: those of the
    metered rows that only probes asked for, which spend nothing.
    """

    decode_rows: int = 0
    metered: int = 0
    probed: int = 0
    reached: int = 0
    sampled_from: int | None = None
    decoded: int = 0
    without_law: str = ""
    drafted: int = 0

    def follow(self, prefix: int, new: int, decoding: bool, prefilling: bool | None) -> tuple[int, int]:
        """Take note of a pass. How many of its last new tokens were sampled, and how long the prefix is whose origin
        must be looked at: that of a chunk, and of the first LOOKS generated tokens after one."""
        if decoding or prefilling is False:
            first = prefix
        elif prefix < self.reached:  # computed once more, after a preemption: behind its prompt with what was sampled
            first = self.reached
        else:
            first = prefix + new
        if first < prefix + new:
            self.sampled_from = first if self.sampled_from is None else min(self.sampled_from, first)
        own = prefix + new if self.sampled_from is None else self.sampled_from
        looked = 0 if decoding and self.decoded >= LOOKS else min(prefix, own)
        self.decoded = self.decoded + 1 if decoding else 0
        self.reached = max(self.reached, prefix + new)
        return max(prefix + new - max(own, prefix), 0), looked


@dataclass(frozen=True)
class MeteredRow:
    """One metered row: its request's index in the batch, its place in the flat query tensor and its position.

    ordinal: 1-based count of metered rows of the request. charged: the same of those the policy asks for, the `t` of
    the failure budget; 0 of a row that only probes asked for. delta_loc: what each of its cells may spend of it; 0
    under the deterministic tier. draft: the row counts if so many drafts were right; 0 for that of a token which was
    none. generated: whether it is of no prompt. probes: ids of the probes that take it.
    """

    request: int
    token: int
    position: int
    ordinal: int
    audited: bool
    sketched: bool = False
    delta_loc: float = 0.0
    draft: int = 0
    charged: int = 0
    generated: bool = False
    probes: tuple[str, ...] = ()


@dataclass
class RowPlan:
    """The metered rows of one pass.

    requests[i] [S_i]: all slots of request i, its new_tokens[i] new ones last, of which the last generated[i] were
    sampled by this server; attends_quantized[i]: whether these read their quantized selves. prefixes: request -> how
    many of its first tokens others may have generated, for `GeneratedSlots`. without_law: request -> why it may spend
    no failure probability. sample: compares the audited rows of sampled requests with the truth. sketches: bounds the
    sketched ones. drafts: request -> how many of its last new tokens are drafts, where any are. lost: rows that probes
    wanted and nothing can meter, drafts among them, by probes, request, reason and whether they were generated.
    """

    rows: list[MeteredRow]
    requests: list[Tensor]
    new_tokens: list[int]
    unmetered: Counter[tuple[int, str]] = field(default_factory=Counter)
    sample: Compares | None = None
    sketches: Sketches | None = None
    generated: list[int] = field(default_factory=list)
    prefixes: dict[int, int] = field(default_factory=dict)
    without_law: dict[int, str] = field(default_factory=dict)
    attends_quantized: list[bool] = field(default_factory=list)
    lost: Counter[tuple[tuple[str, ...], int, str, bool]] = field(default_factory=Counter)
    drafts: dict[int, int] = field(default_factory=dict)

    @property
    def certain(self) -> list[Tensor]:
        """`requests` without their drafts, which the next pass may take back."""
        return [slots[: slots.numel() - self.drafts.get(i, 0)] for i, slots in enumerate(self.requests)]

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([row.token for row in self.rows], dtype=torch.int64)

    def of_request(self, index: int) -> list[int]:
        """Numbers of the rows of request `index` of the batch; they follow one another, positions rising."""
        return [number for number, row in enumerate(self.rows) if row.request == index]

    def slots_of(self, number: int) -> Tensor:
        """The slots [S] that row `number` sees."""
        row = self.rows[number]
        return self.requests[row.request][: row.position + 1]

    def seen_by(self, number: int, spec: AttentionSpec) -> Tensor:
        """The slots [S] that row `number` sees through the layer's window."""
        return spec.visible(self.slots_of(number))

    def metered_requests(self) -> list[Tensor]:
        """`requests`, empty for those without a metered row: nothing of them needs to be read."""
        wanted = {row.request for row in self.rows}
        return [slots if i in wanted else slots[:0] for i, slots in enumerate(self.requests)]

    @property
    def audited(self) -> Tensor:
        return torch.tensor([row.audited for row in self.rows], dtype=torch.bool)


class RowPlanner:
    """Plans every pass of one process; keeps the counts of the requests it has seen.

    Of more than MAX_TRACKED_REQUESTS the one idle longest is forgotten, all but the number of its metered rows. Should
    it go on, they are counted on from there, and it may spend no failure probability.
    """

    def __init__(
        self, *, stride: Stride, max_rows: int, audit_every: int, stored_prefill: bool, without_law: str = ""
    ) -> None:
        """without_law: why no request may spend failure probability, or ''."""
        self.stride = stride
        self.watches = Watches()
        self.max_rows = max_rows
        self.audit_every = audit_every
        self.stored_prefill = stored_prefill
        self.without_law = without_law
        self._requests: OrderedDict[str, RowCounts] = OrderedDict()
        self._forgotten = Forgotten()

    def request(self, rid: str) -> RowCounts:
        rows = self._requests.pop(rid, None) or self._first_seen(rid)
        self._requests[rid] = rows
        if len(self._requests) > MAX_TRACKED_REQUESTS:
            oldest, counts = self._requests.popitem(last=False)
            self._forgotten.add(oldest, counts.metered)
        return rows

    def _first_seen(self, rid: str) -> RowCounts:
        metered = self._forgotten.metered(rid)
        if metered is None:
            return RowCounts(without_law=self.without_law)
        # Which of its tokens were sampled, and what its prefix was, is not known: all that it writes counts as sampled.
        return RowCounts(metered=metered, sampled_from=0, without_law=NOT_FROM_ITS_START)

    def knows(self, rid: str) -> bool:
        """Whether some pass of this request was planned, and it was not forgotten since."""
        return rid in self._requests

    def knows_prefix(self, rid: str) -> bool:
        """Whether the next generated token of this request needs its slots looked at no more."""
        return rid in self._requests and self._requests[rid].decoded >= LOOKS

    def claim_no_law(self, rid: str, why: str) -> None:
        """Of a request known here: from now on it spends no failure probability."""
        self._requests[rid].without_law = why

    def forget(self, rid: str) -> None:
        self._requests.pop(rid, None)

    def plan(self, requests: Sequence[RequestPass]) -> RowPlan:
        """The plan of a pass; the queries of `requests` follow one another in the flat query tensor."""
        picked: list[MeteredRow] = []
        plan = RowPlan(picked, [r.slots for r in requests], [r.new_tokens for r in requests])
        unmetered = plan.unmetered
        token = 0
        self.watches.begin()
        for index, request in enumerate(requests):
            new = request.new_tokens
            prefix = request.slots.numel() - new
            counts = self.request(request.request_id)
            decoding = new == 1 + request.drafts and prefix > 0 and not request.prefilling
            most = max(counts.reached, counts.drafted)
            if decoding and counts.drafted:
                counts.decode_rows -= counts.drafted - prefix  # drafts that were wrong
            counts.drafted = prefix + new if decoding and request.drafts else 0
            if request.drafts:
                plan.drafts[index] = request.drafts
            reads = request.attends_quantized
            plan.attends_quantized.append(decoding or self.stored_prefill if reads is None else reads)
            if decoding and not counts.reached and not counts.without_law:
                # No request begins with a generated token: an earlier pass of this one went by, or was forgotten.
                counts.sampled_from, counts.without_law = 0, NOT_FROM_ITS_START
            # Computed again after a preemption a request has one token more than before at most.
            longer = counts.decode_rows and (prefix >= most or prefix + new > most + 1)
            if request.prefilling and longer and not counts.without_law:
                counts.without_law = AFTER_ITS_ANSWER  # the prompt of a session grows turn by turn
            generated, looked = counts.follow(prefix, new - request.drafts, decoding, request.prefilling)
            plan.generated.append(generated + request.drafts)
            if looked:
                plan.prefixes[index] = looked
            if counts.without_law:
                plan.without_law[index] = counts.without_law
            ordinal = counts.decode_rows
            counts.decode_rows += new if decoding else 0
            asked = self._asked(request, prefix, counts.metered, ordinal if decoding else None)
            if decoding and not request.not_followed:
                wanted = [] if self.stride == NEVER else [i for i in range(new) if (ordinal + i) % self.stride == 0]
                if (left := new - len({*wanted, *asked})) > 0:
                    unmetered[index, "stride"] += left
            elif prefix > 0 or self.stored_prefill:
                wanted = [] if request.not_followed else self._chunk_rows(new - request.drafts)
                if request.not_followed:
                    unmetered[index, request.not_followed] += new
                    plan.lost.update((names, index, request.not_followed, decoding) for names in asked.values())
                    asked = {}
                elif (left := new - len({*wanted, *asked})) > 0:
                    unmetered[index, "stride" if len(wanted) < self.max_rows else "max_rows"] += left
            else:
                wanted = []
            for offset in sorted({*wanted, *asked}):
                counts.metered += 1
                counts.probed += offset not in wanted
                audited = self.audit_every > 0 and (counts.metered - 1) % self.audit_every == 0
                charged = counts.metered - counts.probed if offset in wanted else 0
                row = MeteredRow(index, token + offset, prefix + offset, counts.metered, audited)
                draft, takers = max(offset - (new - 1 - request.drafts), 0), asked.get(offset, ())
                picked.append(replace(row, charged=charged, draft=draft, generated=decoding, probes=takers))
            token += new
        return plan

    def _asked(
        self, request: RequestPass, prefix: int, metered: int, ordinal: int | None
    ) -> dict[int, tuple[str, ...]]:
        """Offset among the new tokens -> the probes that take that row, where it reads the cache.

        metered: rows of the request before. ordinal: decode rows before, None of a chunk.
        """
        if not self.watches or not (prefix > 0 or self.stored_prefill):
            return {}
        new, facts = request.new_tokens, {"request": request.request_id, **request.facts}
        if ordinal is None:
            return self.watches.of_chunk(facts, prefix, new - request.drafts, self.max_rows)
        if new == 1:  # else it depends on the rows before which number a row will have
            facts["step"] = metered + 1
        takers = {i: self.watches.generated({**facts, "position": prefix + i}, ordinal + i) for i in range(new)}
        return {offset: names for offset, names in takers.items() if names}

    def _chunk_rows(self, new: int) -> list[int]:
        """Offsets in a chunk of `new` tokens: the last row, whose token is sampled, and every stride-th before it."""
        return [] if self.stride == NEVER else sorted(range(new - 1, -1, -self.stride)[: self.max_rows])
