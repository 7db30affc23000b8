"""Quantization simulated in the engine's own pool: what the cache would give back is what the pool holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from witcert_core.bands import band_map
from witcert_core.errors import UnsupportedError
from witcert_core.policy import Policy
from witcert_core.repair import BlockRepairer, LayerCall
from witcert_core.shadow import ShadowStore
from witcert_core.store import SlotStore
from witcert_sglang import measuring
from witcert_sglang.calls import AttentionCall, Coded
from witcert_sglang.geometry import Geometry
from witcert_sglang.results import StepCells
from witcert_sglang.rows import RowPlan

if TYPE_CHECKING:
    from witcert_sglang.runtime import Runtime


class SimulatedCache:
    """The engine's pool with the side tensors of every slot and, for a repairing gate, exact copies."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.pool = runtime.pool
        policy, geometry = runtime.policy, runtime.geometry
        self.store = SlotStore(
            quantizer=runtime.quantizer,
            layers=geometry.layers,
            num_slots=geometry.num_slots,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            bands=band_map(geometry.rotary),
            storage_dtype=geometry.pool_dtype,
            keep_exact=policy.meter.audit_every > 0,
            device=geometry.device,
        )
        self.shadow = shadow_store(policy, geometry) if policy.repairs else None
        self.repairer: BlockRepairer | None = None
        if self.shadow is not None:
            self.repairer = BlockRepairer(
                policy.build_gate(),
                self.store,
                self.shadow,
                block_size=policy.gate.block_size,
                max_pagein_bytes=policy.gate.max_pagein_bytes,
                form=policy.meter.form,
            )

    @property
    def bytes_side(self) -> int:
        return self.store.nbytes

    @property
    def bytes_audit(self) -> int:
        return self.store.exact_nbytes

    def begin_pass(self, slots: Tensor) -> None:
        """A pass is about to write into `slots`."""
        if self.shadow is not None and self.repairer is not None:
            self.shadow.claim(slots)
            self.repairer.begin_pass()

    def forget(self, request_id: str) -> None:
        if self.repairer is not None:
            self.repairer.forget(request_id)

    def moved(self, target: Tensor, source: Tensor) -> None:
        """The engine copied rows of the pool; their side tensors follow, exact copies for repairs do not."""
        self.store.move(target, source)
        if self.shadow is not None:
            self.shadow.drop(target)

    def overwritten(self, slots: Tensor) -> None:
        """The engine wrote `slots` from elsewhere: nothing is known about them any more."""
        for layer in self.store.layers:
            self.store.mark_unknown(layer, slots)
        if self.shadow is not None:
            self.shadow.drop(slots)

    def attend(self, call: AttentionCall, plan: RowPlan, step: StepCells) -> Tensor:
        """Attention that reads the chunk exactly or as stored; the pool holds quantized tokens afterwards."""
        layer_id = call.layer.layer_id
        if odd := sorted(set(call.kwargs) - {"sinks"}):
            raise UnsupportedError(f"layer {layer_id} passes {odd} to its attention, which the meter does not follow")
        quantized = layer_id in self.runtime.quantized_layers
        exact = Coded(call.exact_k, None), Coded(call.exact_v, None)
        if call.reads_stored:
            k, v = self.runtime.encode(call) if quantized else exact
            out = call.run(k.values.to(call.exact_k), v.values.to(call.exact_v))
            self._account(call, k, v)
            self._measure(call, plan, step, out)
        else:
            out = call.run(call.k, call.v)
            self.store.mark_exact(layer_id, call.slots)
            self.store.keep(layer_id, call.slots, call.exact_k, call.exact_v)
            self._measure(call, plan, step, out)
            k, v = self.runtime.encode(call) if quantized else exact
            written = k.values.to(call.exact_k), v.values.to(call.exact_v)
            self.pool.set_kv_buffer(call.layer, KVWriteLoc(call.slots, None), *written)
            self._account(call, k, v)
        return out

    def _account(self, call: AttentionCall, k: Coded, v: Coded) -> None:
        layer_id = call.layer.layer_id
        if self.shadow is not None:
            self.shadow.put(layer_id, call.slots, call.exact_k, call.exact_v)
        self.store.write(
            layer_id,
            call.slots,
            exact_k=call.exact_k,
            exact_v=call.exact_v,
            stored_k=self.pool.get_key_buffer(layer_id)[call.slots],
            stored_v=self.pool.get_value_buffer(layer_id)[call.slots],
            encoded_k=k.codes,
            encoded_v=v.codes,
        )

    def _measure(self, call: AttentionCall, plan: RowPlan, step: StepCells, out: Tensor) -> None:
        """Meter the planned rows; a repairing gate may change the pool and rows of `out`."""
        layer, runtime = call.layer, self.runtime
        if not plan.rows or layer.layer_id not in runtime.metered_layers:
            return
        read = LayerCall(
            layer=layer.layer_id,
            k_cache=self.pool.get_key_buffer(layer.layer_id),
            v_cache=self.pool.get_value_buffer(layer.layer_id),
            sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap,
            window_left=layer.sliding_window_size,
            sinks=call.kwargs.get("sinks"),
            exact_k=self.store.exact_k.get(layer.layer_id),
        )
        heads, dim = runtime.geometry.num_qo_heads, runtime.geometry.head_dim
        rows = call.q.reshape(-1, heads, dim)[plan.tokens]
        deltas = runtime.deltas(plan)
        if self.repairer is None:
            measuring.observe(step, plan, read, rows, self.store[layer.layer_id], deltas, runtime.policy.meter.form)
        else:
            outputs = out.view(-1, heads, runtime.geometry.v_head_dim)
            measuring.gate(step, plan, read, rows, outputs, self.repairer, deltas)

    def status(self) -> dict[str, int]:
        """Memory of the exact copies for repairs, for the banner."""
        shadow = self.shadow
        return {
            "bytes_shadow": 0 if shadow is None else shadow.nbytes,
            "shadow_slots": 0 if shadow is None else shadow.num_rows,
        }


def shadow_store(policy: Policy, geometry: Geometry) -> ShadowStore:
    """Exact copies for repairs, as many slots as `gate.shadow_bytes` allows (null: every slot of the pool)."""
    width = geometry.head_dim + geometry.v_head_dim
    per_slot = len(geometry.layers) * geometry.num_kv_heads * width * geometry.pool_dtype.itemsize
    limit = policy.gate.shadow_bytes
    if limit is not None and limit < per_slot:
        raise UnsupportedError(
            f"gate.shadow_bytes is {limit}; one slot of this model takes {per_slot} bytes: allow that, or null for all"
        )
    return ShadowStore(
        layers=geometry.layers,
        num_slots=geometry.num_slots,
        num_rows=geometry.num_slots if limit is None else limit // per_slot,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        dtype=geometry.pool_dtype,
        pinned=geometry.device != "cpu",
    )
