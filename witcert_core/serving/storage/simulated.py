"""Quantization simulated in the engine's own pool: what the cache would give back is what the pool holds.

Tokens that a quantizer takes in groups, keeps exact for a while or calibrates on are written exactly and quantized in
place once they are due (`closing.py`): in a pass that reads what is stored before its attention, else after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from witcert_core.cache.bands import BandMap, band_map
from witcert_core.cache.capacity import choose_bands
from witcert_core.cache.exact_copies import ExactCopies
from witcert_core.cache.protocols import Pool, StoredErrors
from witcert_core.cache.schedule import PendingTokens, QuantizeSchedule, ReadyTokens
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy
from witcert_core.quantizers.base import KINDS
from witcert_core.serving.calls import AttentionCall, Quantized
from witcert_core.serving.encoder import Encoder
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RowPlan
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage import measuring
from witcert_core.serving.storage.gated_rows import LayerCall
from witcert_core.serving.storage.repair import BlockRepairer

Rewritten = Callable[[int, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], None]


class SimulatedCache:
    """The engine's pool with the side tensors of every slot and, for a repairing gate, exact copies."""

    reads_engine = False  # whether what the engine itself quantizes is metered

    def __init__(self, policy: Policy, geometry: Geometry, pool: Pool, encoder: Encoder) -> None:
        if policy.meters_engine and not self.reads_engine:
            raise UnsupportedError(
                f"quantizer.name is 'engine', but under {geometry.backend} no cache of the engine's own is read back: "
                "name a quantizer"
            )
        self.policy = policy
        self.geometry = geometry
        self.pool = pool
        self.encoder = encoder
        self.quantized_layers = frozenset(policy.quantizer.layers_of(geometry.layers))
        self.metered_layers = frozenset(policy.meter.layers_of(geometry.layers))
        self.store = WitnessStore(
            quantizer=encoder.quantizer,
            layers=geometry.layers,
            num_slots=geometry.num_slots,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            bands=bands_of(policy, geometry),
            storage_dtype=geometry.pool_dtype,
            keep_exact=policy.meter.audit_every > 0,
            sketch_bits=policy.sketch_bits,
            device=geometry.device,
        )
        rule = QuantizeSchedule.of(encoder.quantizer)
        self.open = None if rule.immediate else PendingTokens(rule, geometry.num_slots, geometry.device)
        self.due: ReadyTokens | None = None
        self.rewritten: Rewritten | None = None
        self.copies = exact_copies(policy, geometry) if policy.repairs else None
        self.repairer: BlockRepairer | None = None
        if self.copies is not None:
            gated = self.metered_layers & self.quantized_layers
            self.repairer = block_repairer(policy, self.store, self.copies, len(gated))

    @property
    def bytes_side(self) -> int:
        return self.store.nbytes + (0 if self.open is None else self.open.nbytes)

    @property
    def bytes_audit(self) -> int:
        return self.store.exact_nbytes

    def begin_pass(self, slots: Tensor, requests: Sequence[Tensor]) -> None:
        """A pass is about to write into `slots` [N]; requests: all slots of each of its requests, in order."""
        if self.open is not None:
            self.open.written(slots)
            self.due = self.open.due(requests)
        if self.copies is not None and self.repairer is not None:
            self.copies.claim(slots)
            self.repairer.begin_pass()

    def forget(self, request_id: str) -> None:
        if self.repairer is not None:
            self.repairer.forget(request_id)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied rows of the pool; their side tensors follow, exact copies for repairs do not."""
        self.store.move(target, source)
        if self.open is not None:
            self.open.moved(target, source)
        if self.copies is not None:
            self.copies.drop(target)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` from elsewhere: nothing is known about them any more."""
        for layer in self.store.layers:
            self.store.mark_unknown(layer, slots)
        if self.open is not None:
            self.open.overwritten(slots)
        if self.copies is not None:
            self.copies.drop(slots)

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float]) -> Tensor:
        """Attention that reads the chunk exactly or as stored; the pool holds quantized tokens afterwards."""
        quantized = call.layer in self.quantized_layers
        if quantized and self.open is not None:
            return self._attend_open(call, plan, step, deltas)
        k, v = self._encode(call) if quantized else (Quantized(call.exact_k, None), Quantized(call.exact_v, None))
        early, late = _halves(call, k, v)
        if early is None:
            out = call.run(None, None)
        else:
            read_k, read_v = k.values.to(call.exact_k), v.values.to(call.exact_v)
            if late is not None:
                first = call.early[:, None, None]
                read_k, read_v = torch.where(first, read_k, call.exact_k), torch.where(first, read_v, call.exact_v)
            out = call.run(read_k, read_v)
            self._account(*early)
        if late is not None and plan.rows:
            own = late[0]
            self.store.mark_exact(call.layer, own.slots)
            self.store.keep(call.layer, own.slots, own.exact_k, own.exact_v)
        self._measure(call, plan, step, deltas, out)
        if late is not None:
            own, k, v = late
            self.pool.write(call.layer, own.slots, k.values.to(own.exact_k), v.values.to(own.exact_v))
            self._account(own, k, v)
        return out

    def stored(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that attention reads in `slots` [N] from now on."""
        return self.pool.read(layer, slots)

    def _encode(self, call: AttentionCall) -> tuple[Quantized, Quantized]:
        return self.encoder.encode(call.layer, call.slots, call.positions, call.exact_k, call.exact_v)

    def _attend_open(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float]) -> Tensor:
        """The new tokens are open; a request that reads what is stored has its due ones closed before attention."""
        if self.encoder.quantizer.space == "pre_rope":
            self._check_positions(call, plan)
        exact = Quantized(call.exact_k, None), Quantized(call.exact_v, None)
        first_token = torch.tensor([0, *plan.new_tokens[:-1]], device=call.slots.device).cumsum(0)
        early = call.early[first_token]
        if early.any():
            self.pool.write(call.layer, call.slots, call.exact_k, call.exact_v)
            self._account(call, *exact)
            self._close(call.layer, early)
            out = call.run(*self.pool.read(call.layer, call.slots))
        else:
            out = call.run(None, None)
            self._account(call, *exact)
        self._measure(call, plan, step, deltas, out)
        self._close(call.layer, ~early)
        return out

    def _close(self, layer: int, of_requests: Tensor) -> None:
        """Quantize what is due of some requests [R] bool, in place: until now the pool holds it exactly."""
        if self.open is None or self.due is None:
            return
        due = self.due.of(of_requests)
        if not due.slots.numel():
            return
        for anchor in self.open.without_state(due.anchors, layer):
            for kind, exact in zip(KINDS, self.pool.read(layer, due.calibrating[anchor]), strict=True):
                self.open.set_state(anchor, layer, kind, self.encoder.calibrate(kind, layer, exact))
        exact_k, exact_v = self.pool.read(layer, due.slots)
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        if due.anchors.numel():
            states = self.open.state(due.anchors, layer, "k"), self.open.state(due.anchors, layer, "v")
        k, v = self.encoder.encode(layer, due.slots, due.positions, exact_k, exact_v, states)
        self.pool.write(layer, due.slots, k.values.to(exact_k), v.values.to(exact_v))
        stored_k, stored_v = self.pool.read(layer, due.slots)
        self.store.write(layer, due.slots, exact_k=exact_k, exact_v=exact_v, stored_k=stored_k, stored_v=stored_v)
        if self.rewritten is not None:
            self.rewritten(layer, due.slots, (exact_k, exact_v), (stored_k, stored_v))

    def _check_positions(self, call: AttentionCall, plan: RowPlan) -> None:
        """Tokens closed later are turned back by their place in the request: it must be their rotary position."""
        lengths = zip(plan.requests, plan.new_tokens, strict=True)
        places = [torch.arange(slots.numel() - new, slots.numel()) for slots, new in lengths]
        if not torch.equal(torch.cat(places), call.positions.cpu().to(torch.int64)):
            raise UnsupportedError(
                f"layer {call.layer}: rotary positions are not the tokens' places in their requests; keys before RoPE "
                f"cannot be had for quantizer {self.encoder.quantizer.name!r} here"
            )

    def _account(self, call: AttentionCall, k: Quantized, v: Quantized) -> None:
        if self.copies is not None:
            self.copies.put(call.layer, call.slots, call.exact_k, call.exact_v)
        stored_k, stored_v = self.pool.read(call.layer, call.slots)
        self.store.write(
            call.layer,
            call.slots,
            exact_k=call.exact_k,
            exact_v=call.exact_v,
            stored_k=stored_k,
            stored_v=stored_v,
            encoded_k=k.codes,
            encoded_v=v.codes,
        )

    def _measure(self, call: AttentionCall, plan: RowPlan, step: StepCells, deltas: list[float], out: Tensor) -> None:
        """Meter the planned rows; a repairing gate may change the pool and rows of `out`."""
        if not plan.rows or call.layer not in self.metered_layers:
            return
        exact_k = self.store.exact_k.get(call.layer)
        outputs = out.view(-1, self.geometry.num_qo_heads, self.geometry.v_head_dim)
        if self.repairer is None:
            seen = [plan.slots_of(number) for number in range(len(plan.rows))]
            read, radii = functools.partial(self.pool.read, call.layer), self.store[call.layer]
            form, made = self.policy.meter.form, list(outputs[plan.tokens])
            measuring.observe(step, plan, call, seen, read, radii, exact_k, deltas, form, made)
            return
        layer_call = LayerCall(
            layer=call.layer,
            pool=self.pool,
            spec=call.spec,
            exact_k=exact_k,
        )
        measuring.gate(step, plan, layer_call, call.q[plan.tokens], outputs, self.repairer, deltas)

    def status(self) -> dict[str, int]:
        """Memory of the exact copies for repairs, for the banner."""
        copies = self.copies
        return {
            "bytes_copies": 0 if copies is None else copies.nbytes,
            "copy_slots": 0 if copies is None else copies.num_rows,
        }


_Half = tuple[AttentionCall, Quantized, Quantized]


def _halves(call: AttentionCall, k: Quantized, v: Quantized) -> tuple[_Half | None, _Half | None]:
    """The tokens that are read as stored in this pass already, and those that are not; None where there are none."""
    alike = call.alike
    if alike is not None:
        whole = call, k, v
        return (whole, None) if alike else (None, whole)
    early, late = call.early, ~call.early
    return (call.part(early), k.part(early), v.part(early)), (call.part(late), k.part(late), v.part(late))


def bands_of(policy: Policy, geometry: Geometry) -> BandMap:
    """The bands of K's channels whose errors' norms are kept."""
    rotary, quantizer = geometry.rotary, policy.resolved_quantizer
    return band_map(
        rotary, choose_bands(quantizer, rotary, geometry.v_head_dim, policy.sketch_bits, policy.meter.bands)
    )


def block_repairer(policy: Policy, store: StoredErrors, copies: ExactCopies, num_layers: int) -> BlockRepairer:
    """The gate of a policy at work over `num_layers` layers.

    Under the dither law each layer gets an equal share of `gate.max_pagein_bytes`, fixed in advance (see
    `BlockRepairer`).
    """
    limit, apart = policy.gate.max_pagein_bytes, policy.tier == "probabilistic"
    return BlockRepairer(
        policy.resolved_gate,
        store,
        copies,
        block_size=policy.gate.block_size,
        max_pagein_bytes=limit // max(num_layers, 1) if apart and limit is not None else limit,
        layers_apart=apart,
        form=policy.meter.form,
    )


def exact_copies(policy: Policy, geometry: Geometry) -> ExactCopies:
    """Exact copies for repairs, as many slots as `gate.copy_bytes` allows (null: every slot of the pool)."""
    width = geometry.head_dim + geometry.v_head_dim
    per_slot = len(geometry.layers) * geometry.num_kv_heads * width * geometry.pool_dtype.itemsize
    limit = policy.gate.copy_bytes
    if limit is not None and limit < per_slot:
        raise UnsupportedError(
            f"gate.copy_bytes is {limit}; one slot of this model takes {per_slot} bytes: allow that, or null for all"
        )
    return ExactCopies(
        layers=geometry.layers,
        num_slots=geometry.num_slots,
        num_rows=geometry.num_slots if limit is None else limit // per_slot,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        dtype=geometry.pool_dtype,
        pinned=geometry.device != "cpu",
    )
