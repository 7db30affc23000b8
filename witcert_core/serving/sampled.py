"""Exact copies for a sample of requests: what compression really did to them, for a fixed number of bytes.

An audit of everything keeps a copy of the whole cache. Here a request is drawn when its first pass begins; the keys and
values it computes are copied to host memory beside the cache, by slot, and every metered row of it is compared with
attention over them. A request whose prefix has no copies (another one computed it), for which there is no room, or
whose copies had to make room for another's, is *not audited*, and its rows say why; a row is audited only if the copy
of every token it sees is there. Sketches of another sample are kept by the same rules (`sketched.py`).

Shapes: N tokens, S tokens a row sees, H query heads, Hkv local KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from witcert_core.cache.copy_index import CopyIndex
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.errors import UnsupportedError
from witcert_core.meter.audit import true_error
from witcert_core.meter.truth import Truth
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import MAX_TRACKED_REQUESTS, Attends, ReadRow, RequestPass, RowPlan
from witcert_core.serving.ranks import Ranks

PREFIX = "its prefix was computed by a request without exact copies"
NO_ROOM = "no room in meter.share_bytes"
EVICTED = "its exact copies made room for another request's"


class RequestSample:
    """Every request is drawn with probability `share`, by a keyed hash of how many were asked about before it.

    With the key known the draw can be repeated; what a client sends has no part in it. Draws of several streams under
    one key are independent of each other.
    """

    def __init__(self, share: float, seed: int, stream: bytes = b"") -> None:
        self.share = share
        self._stream = stream
        self._key = seed.to_bytes(16, "big", signed=True)
        self._asked = 0

    def draw(self) -> bool:
        digest = hashlib.blake2b(self._asked.to_bytes(8, "big"), key=self._key, digest_size=8, person=self._stream)
        self._asked += 1
        return int.from_bytes(digest.digest(), "big") < self.share * 2.0**64


@dataclass
class _Drawn:
    """A request of the sample: whether a pass of it began; why its rows are left out from now on, if they are."""

    began: bool = False
    reason: str = ""


class SampledTokens:
    """Something kept in host memory of every token of the requests of a sample, in the metered layers; one per process.

    index: of what is kept. prefix, no_room, evicted: why rows are left out. All layers of a slot come and go together;
    what was used longest ago goes first, but never that of a request that is in the pass.
    """

    prefix: str
    no_room = NO_ROOM
    evicted: str

    def __init__(self, sample: RequestSample, index: CopyIndex, layers: Sequence[int]) -> None:
        self.sample = sample
        self.index = index
        self.layers = frozenset(layers)
        self._drawn: OrderedDict[str, _Drawn | None] = OrderedDict()
        self._holds = False  # whether anything was ever kept: until then there is nothing to void
        self._writes = False  # whether this pass writes tokens of the sample

    def begin(self, requests: Sequence[RequestPass], out_slots: Tensor) -> None:
        """A pass over `requests` is about to write `out_slots` [N]: what they had is void, new tokens get room."""
        drawn = [(request, self._state(request.request_id)) for request in requests]
        mine = [(request, state) for request, state in drawn if state is not None]
        self._writes = False
        if self._holds:
            self.index.drop(out_slots)
        if not mine:
            return
        self.index.advance()
        fits: list[tuple[RequestPass, _Drawn]] = []
        for request, state in mine:
            prefix = request.slots[: request.slots.numel() - request.new_tokens]
            if not state.reason and prefix.numel():
                state.reason = self._lacks(state, prefix, fits)
            state.began = True
            if not state.reason:
                self.index.touch(prefix)
                fits.append((request, state))
        for request, state in fits:
            if request.new_tokens > self.index.room:
                state.reason = self.no_room
                continue
            self._claim(request.slots[-request.new_tokens :])
            self._holds = self._writes = True

    def _claim(self, slots: Tensor) -> None:
        self.index.claim(slots, advance=False)

    def _state(self, request_id: str) -> _Drawn | None:
        """Of a request of the sample; None for any other."""
        if request_id in self._drawn:
            self._drawn.move_to_end(request_id)
        else:
            self._drawn[request_id] = _Drawn() if self.sample.draw() else None
            if len(self._drawn) > MAX_TRACKED_REQUESTS:
                self._drawn.popitem(last=False)
        return self._drawn[request_id]

    def _lacks(self, state: _Drawn, prefix: Tensor, others: Sequence[tuple[RequestPass, _Drawn]]) -> str:
        """Why not every token of the prefix is kept, or will be in this pass; empty if every one is."""
        here = self.index.has(prefix)
        for other, _ in others:  # an engine may share a prefix in the very pass that computes it
            here |= torch.isin(prefix, other.slots[-other.new_tokens :])
        if bool(here.all()):
            return ""
        return self.evicted if state.began else self.prefix

    def whole(self, requests: Sequence[RequestPass]) -> dict[int, str]:
        """Requests of the sample, by index in the pass: '' if every token of theirs is kept, else why not.

        Tokens claimed for this pass count: what is kept of them is made before the layer attends.
        """
        found: dict[int, str] = {}
        for index, request in enumerate(requests):
            state = self._drawn.get(request.request_id)
            if state is None:
                continue
            if not state.reason and not bool(self.index.has(request.slots).all()):
                state.reason = self.evicted
            found[index] = state.reason
        return found

    def drop(self, slots: Tensor) -> None:
        """Something else is in `slots` [N] now."""
        if self._holds:
            self.index.drop(slots)

    def forget(self, request_id: str) -> None:
        """The request is over; what was kept of it stays for those that share its prefix, until its room is needed."""
        self._drawn.pop(request_id, None)


class SampledCopies(SampledTokens):
    """Exact copies."""

    prefix, evicted = PREFIX, EVICTED

    def __init__(self, sample: RequestSample, copies: ExactCopies, layers: Sequence[int]) -> None:
        super().__init__(sample, copies, layers)
        self.copies = copies

    @property
    def nbytes(self) -> int:
        return self.copies.nbytes

    def plan(self, plan: RowPlan, requests: Sequence[RequestPass]) -> tuple[RowPlan, Counter[tuple[int, str]]]:
        """The plan with rows marked whose every token has a copy; the sample's other rows, by request and reason."""
        whole = self.whole(requests)
        rows = [replace(row, audited=not whole[row.request]) if row.request in whole else row for row in plan.rows]
        return replace(plan, rows=rows, sample=self), left_out(plan, whole)

    def put(self, call: AttentionCall) -> None:
        """Copy the new tokens of one layer, as the model handed them over; before the layer attends."""
        if self._writes and call.layer in self.layers:
            self.copies.put(call.layer, call.slots, call.exact_k, call.exact_v)

    def compare(self, how: Attends, rows: Tensor, plan: RowPlan, read: ReadRow, numbers: Sequence[int]) -> Truth | None:
        """Part of `Compares`."""
        audited = [number for number in numbers if plan.rows[number].audited]
        if not audited or how.layer not in self.layers:
            return None
        found = []
        for number in audited:
            k, v = self.copies.get(how.layer, plan.seen_by(number, how.spec), slice(None))
            found.append(true_error(rows[number], read(number), (k.to(rows.device), v.to(rows.device)), how.spec))
        tv, out = zip(*found, strict=True)
        return Truth(audited, torch.stack(tv).cpu(), torch.stack(out).cpu())


def left_out(plan: RowPlan, whole: dict[int, str]) -> Counter[tuple[int, str]]:
    """The rows of the plan of which `whole` says that not every token is kept, by request and reason."""
    reasons = ((row.request, whole.get(row.request, "")) for row in plan.rows)
    return Counter((request, reason) for request, reason in reasons if reason)


def share_seed(policy: Policy, ranks: Ranks) -> int:
    """The key of the draws. All ranks must draw the same requests: a cell needs the tokens of all its heads."""
    seed = policy.meter.share_seed
    return ranks.from_root(secrets.randbits(64) if seed is None else seed)


def sampled_copies(policy: Policy, geometry: Geometry, ranks: Ranks) -> SampledCopies | None:
    """Those that the policy asks for; UnsupportedError where `meter.share_bytes` has no room for a token."""
    meter = policy.meter
    if not meter.audit_share:
        return None
    layers = meter.layers_of(geometry.layers)
    width = geometry.head_dim + geometry.v_head_dim
    per_token = len(layers) * geometry.num_kv_heads * width * geometry.pool_dtype.itemsize
    if meter.share_bytes < per_token:
        raise UnsupportedError(
            f"meter.share_bytes is {meter.share_bytes}; one token of this model takes {per_token} bytes: allow that, "
            "or set meter.audit_share to 0"
        )
    copies = ExactCopies(
        layers=layers,
        num_slots=geometry.num_slots,
        num_copies=meter.share_bytes // per_token,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        dtype=geometry.pool_dtype,
        pinned=geometry.device != "cpu",
    )
    return SampledCopies(RequestSample(meter.audit_share, share_seed(policy, ranks)), copies, layers)
