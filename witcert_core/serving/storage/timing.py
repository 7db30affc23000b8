"""When the tokens of a simulated cache are quantized: as they are written, or in place once they are due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.protocols import Pool
from witcert_core.cache.schedule import PendingTokens, QuantizeSchedule, ReadyTokens
from witcert_core.errors import UnsupportedError
from witcert_core.serving.calls import AttentionCall, Quantized
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.forward import Pass
from witcert_core.serving.storage.accounts import Accounts, unquantized
from witcert_core.serving.storage.attended import Rewritten

Encode = Callable[[AttentionCall], tuple[Quantized, Quantized]]


class AtOnce:
    """Tokens are quantized as they are written: before their pass attends, or after it where it reads them exactly."""

    nbytes = 0

    def __init__(self, pool: Pool, accounts: Accounts, encode: Encode) -> None:
        self.pool = pool
        self.accounts = accounts
        self.encode = encode

    def begin_pass(self, now: Pass) -> None: ...

    def moved(self, target: Tensor, source: Tensor) -> None:
        """As in `Later.moved`: nothing is pending."""

    def overwritten(self, slots: Tensor) -> None:
        """As in `Later.overwritten`: nothing is pending."""

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Tensor]:
        """The layer's output, within the block the exact tokens are still exact."""
        which, layer, store = now.attends_quantized, call.layer, self.accounts.store
        k, v = self.encode(call)
        (early, late), (early_k, late_k), (early_v, late_v) = which.split(call), which.split(k), which.split(v)
        if early is None:
            out = call.run(None, None)
        else:
            read_k, read_v = k.values.to(call.exact_k), v.values.to(call.exact_v)
            if late is not None:
                first = which.mask[:, None, None]
                read_k, read_v = torch.where(first, read_k, call.exact_k), torch.where(first, read_v, call.exact_v)
            out = call.run(read_k, read_v)
        if early is not None and early_k is not None and early_v is not None:
            self.accounts.write(early, early_k, early_v)
        if late is not None and now.plan.rows:
            store.mark_exact(layer, late.slots)
            store.keep(layer, late.slots, late.exact_k, late.exact_v)
        yield out
        if late is not None and late_k is not None and late_v is not None:
            self.pool.write(layer, late.slots, late_k.values.to(late.exact_k), late_v.values.to(late.exact_v))
            self.accounts.write(late, late_k, late_v)


@dataclass
class _Due:
    """What a pass quantizes: of requests that read what is stored before they attend, of the others after it."""

    before: ReadyTokens
    after: ReadyTokens
    positions_checked: bool = False


class Later:
    """Tokens that a quantizer takes in groups, keeps exact for a while or calibrates on: written exactly, quantized in
    place once they are due (`schedule.py`), in a pass that reads what is stored before its attention, else after it."""

    def __init__(
        self, pool: Pool, accounts: Accounts, encoder: Encoder, pending: PendingTokens, rewritten: Rewritten
    ) -> None:
        self.pool = pool
        self.accounts = accounts
        self.encoder = encoder
        self.pending = pending
        self.rewritten = rewritten
        self._due: _Due | None = None

    @property
    def nbytes(self) -> int:
        return self.pending.nbytes

    def begin_pass(self, now: Pass) -> None:
        self.pending.written(now.slots)
        due = self.pending.ready(now.plan.certain)  # a group that holds a draft might be written again in part
        before = torch.tensor(now.plan.attends_quantized, dtype=torch.bool).to(due.requests.device)
        self._due = _Due(due.of(before), due.of(~before))

    def moved(self, target: Tensor, source: Tensor) -> None:
        """As in `PendingTokens.moved`."""
        self.pending.moved(target, source)

    def overwritten(self, slots: Tensor) -> None:
        """As in `PendingTokens.overwritten`."""
        self.pending.overwritten(slots)

    @contextmanager
    def attending(self, call: AttentionCall, now: Pass) -> Iterator[Tensor]:
        """The layer's output; within the block what a pass that reads its tokens exactly quantizes is still exact."""
        due = self._due
        if due is None:
            raise RuntimeError(f"layer {call.layer} attends in a pass that did not begin")
        if self.encoder.quantizer.space == "pre_rope" and not due.positions_checked:
            self._check_positions(call, now)
            due.positions_checked = True
        if now.attends_quantized.any:
            self.pool.write(call.layer, call.slots, call.exact_k, call.exact_v)
            self.accounts.write(call, *unquantized(call))
            self._quantize(call.layer, due.before)
            out = call.run(*self.pool.read(call.layer, call.slots))
        else:
            out = call.run(None, None)
            self.accounts.write(call, *unquantized(call))
        yield out
        self._quantize(call.layer, due.after)

    def _quantize(self, layer: int, due: ReadyTokens) -> None:
        """Quantize what is due, in place: until now the pool holds it exactly."""
        if not due.slots.numel():
            return
        for anchor in self.pending.without_state(due.anchors, layer, self.encoder.kinds[-1]):
            for kind, exact in zip(self.encoder.kinds, self.pool.read(layer, due.calibrating[anchor]), strict=False):
                self.pending.set_state(anchor, layer, kind, self.encoder.calibrate(kind, layer, exact))
        exact_k, exact_v = self.pool.read(layer, due.slots)
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        if due.anchors.numel():
            of_k, *of_v = (self.pending.state(due.anchors, layer, kind) for kind in self.encoder.kinds)
            states = of_k, of_v[0] if of_v else None
        k, v = self.encoder.encode(layer, due.slots, due.positions, exact_k, exact_v, states)
        self.pool.write(layer, due.slots, k.values.to(exact_k), v.values.to(exact_v))
        stored_k, stored_v = self.pool.read(layer, due.slots)
        store = self.accounts.store
        store.write(layer, due.slots, exact_k=exact_k, exact_v=exact_v, stored_k=stored_k, stored_v=stored_v)
        self.rewritten(layer, due.slots, (exact_k, exact_v), (stored_k, stored_v))

    def _check_positions(self, call: AttentionCall, now: Pass) -> None:
        """Tokens quantized later are turned back by their place in the request: it must be their rotary position."""
        lengths = zip(now.plan.requests, now.plan.new_tokens, strict=True)
        places = [torch.arange(slots.numel() - new, slots.numel()) for slots, new in lengths]
        if not torch.equal(torch.cat(places), call.positions.cpu().to(torch.int64)):
            raise UnsupportedError(
                f"layer {call.layer}: rotary positions are not the tokens' places in their requests; keys before RoPE "
                f"cannot be had for quantizer {self.encoder.quantizer.name!r} here"
            )


def timing(pool: Pool, accounts: Accounts, encoder: Encoder, rewritten: Rewritten) -> AtOnce | Later:
    """As the quantizer asks for it. rewritten: told of every later rewrite."""
    schedule, geometry = QuantizeSchedule.of(encoder.quantizer), encoder.geometry
    if not schedule.immediate:
        pending = PendingTokens(schedule, geometry.num_slots, geometry.device)
        pending.overwritten(torch.arange(geometry.null_slots))  # what has left a window waits for nothing
        return Later(pool, accounts, encoder, pending, rewritten)

    def encode(call: AttentionCall) -> tuple[Quantized, Quantized]:
        return encoder.encode(call.layer, call.slots, call.positions, call.exact_k, call.exact_v)

    return AtOnce(pool, accounts, encode)
