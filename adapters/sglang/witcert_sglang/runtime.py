"""The meter of one SGLang scheduler process: quantizes what is written, measures what is read, keeps the ledger."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from witcert_core.bands import band_map
from witcert_core.budget import Budget
from witcert_core.dither import DitherKey
from witcert_core.errors import UnsupportedError
from witcert_core.policy import Policy
from witcert_core.quantizers.base import DitheredQuantizer, Encoded, QuantContext, Quantizer
from witcert_core.repair import BlockRepairer, LayerCall
from witcert_core.report.jsonl import JsonlWriter
from witcert_core.report.prometheus import Metrics
from witcert_core.report.summary import RequestLedger
from witcert_core.shadow import ShadowStore
from witcert_core.store import SlotStore
from witcert_sglang import measuring
from witcert_sglang.geometry import Geometry
from witcert_sglang.results import StepCells
from witcert_sglang.rows import RowPlan, RowPlanner

LAST_ROW_ID = 2**32 - 1


class Runtime:
    """State of the metered scheduler process; built when the attention backend is, once the pool exists."""

    def __init__(
        self, policy: Policy, quantizer: Quantizer, geometry: Geometry, pool: Any, metrics: Metrics | None
    ) -> None:
        self.policy = policy
        self.quantizer = quantizer
        self.geometry = geometry
        self.pool = pool
        meter = policy.meter
        self.quantized_layers = frozenset(policy.quantizer.layers_of(geometry.layers))
        self.metered_layers = frozenset(meter.layers_of(geometry.layers))
        self.store = SlotStore(
            quantizer=quantizer,
            layers=geometry.layers,
            num_slots=geometry.num_slots,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            v_head_dim=geometry.v_head_dim,
            bands=band_map(geometry.rotary),
            storage_dtype=geometry.pool_dtype,
            keep_exact=meter.audit_every > 0,
            device=geometry.device,
        )
        self.planner = RowPlanner(
            stride=meter.stride,
            # A gate that repairs must see every row that reads the cache.
            max_rows=geometry.num_slots if policy.repairs else meter.max_rows,
            audit_every=meter.audit_every,
            stored_prefill=policy.prefill_reads == "stored",
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
                form=meter.form,
            )
        self.uses_dither = quantizer.tier == "dither" and meter.tier != "witness"
        self.budget = Budget(
            delta=meter.delta,
            num_layers=len(self.metered_layers),
            num_qo_heads=geometry.num_qo_heads,
            declared_rows=meter.declared_rows,
        )
        self.ledger = RequestLedger(
            policy,
            engine="sglang",
            num_layers=len(geometry.layers),
            num_qo_heads=geometry.num_qo_heads,
            layers_excluded={
                layer: "left out by meter.layers" for layer in geometry.layers if layer not in self.metered_layers
            },
            jsonl=JsonlWriter(policy.report.jsonl) if policy.report.jsonl else None,
            metrics=metrics,
        )
        # The nonce makes the rows of two runs differ; it need not be remembered, the codes die with the pool.
        self.dither_key = DitherKey(seed=0, nonce=secrets.randbits(63), dp_rank=0)
        self.row_ids = torch.zeros(geometry.num_slots, dtype=torch.int64)  # row 0: never written
        self.passes = 0
        self.step: StepCells | None = None
        self.plan: RowPlan | None = None
        self.attention_calls = 0

    # One forward pass -------------------------------------------------------------------------------------------

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `ModelRunner.forward`: plans the rows, lets the pass run, sends the cells along with its logits."""
        if forward_batch.forward_mode.is_idle() or not forward_batch.rids:
            return original(runner, forward_batch, *args, **kwargs)
        self._begin(runner, forward_batch)
        output = original(runner, forward_batch, *args, **kwargs)
        if self.attention_calls != len(self.geometry.layers):
            raise UnsupportedError(
                f"{self.attention_calls} metered attention calls in a pass over {len(self.geometry.layers)} layers: "
                "some attention bypasses the meter, so nothing is served"
            )
        if output.logits_output is not None:
            output.logits_output.witcert_step = self.step
        self.step = self.plan = None
        return output

    def _begin(self, runner: Any, forward_batch: Any) -> None:
        if self.passes >= LAST_ROW_ID - 1:
            raise UnsupportedError(
                f"{self.passes} forward passes are done and every dither row id is used; restart the server"
            )
        self.passes += 1
        self.row_ids[forward_batch.out_cache_loc] = self.passes
        self.attention_calls = 0
        if self.shadow is not None and self.repairer is not None:
            self.shadow.claim(forward_batch.out_cache_loc)
            self.repairer.begin_pass()
        self.plan = self.planner.plan(forward_batch, runner.req_to_token_pool.req_to_token)
        self.step = StepCells(self, list(forward_batch.rids), self.plan.rows, unmetered=self.plan.unmetered)

    # One attention call -----------------------------------------------------------------------------------------

    def attend(
        self,
        attention: Callable[..., Tensor],
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        is_decode: bool,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Run the engine's attention of one layer on quantized keys and values, and meter the planned rows."""
        if self.plan is None:  # warm-up passes of the engine carry no requests
            return attention(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        self.attention_calls += 1
        layer_id = layer.layer_id
        if k is None or v is None or not save_kv_cache:
            raise UnsupportedError(
                f"layer {layer_id} attends without writing its keys through the pool (a fused write or shared KV): "
                "what is stored cannot be metered; unset WITCERT_POLICY for this model"
            )
        # Exact is what a plain pool would have held: rounding to its dtype is not the quantizer's doing, and must
        # come first, or the dither's radius would miss it.
        dtype = self.geometry.pool_dtype
        exact_k = k.reshape(-1, self.geometry.num_kv_heads, self.geometry.head_dim).to(dtype)
        exact_v = v.reshape(-1, self.geometry.num_kv_heads, self.geometry.v_head_dim).to(dtype)
        slots = forward_batch.out_cache_loc
        if is_decode or self.policy.prefill_reads == "stored":
            written_k, written_v, codes_k, codes_v = self._quantize(layer_id, exact_k, exact_v, forward_batch)
            out = attention(q, written_k, written_v, layer, forward_batch, save_kv_cache=True, **kwargs)
            self._account(layer_id, slots, exact_k, exact_v, codes_k, codes_v)
            self._measure(layer, q, out, kwargs)
        else:
            out = attention(q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs)
            self.store.mark_exact(layer_id, slots)
            self.store.keep(layer_id, slots, exact_k, exact_v)
            self._measure(layer, q, out, kwargs)
            written_k, written_v, codes_k, codes_v = self._quantize(layer_id, exact_k, exact_v, forward_batch)
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots, None), written_k, written_v)
            self._account(layer_id, slots, exact_k, exact_v, codes_k, codes_v)
        return out

    def _quantize(
        self, layer_id: int, k: Tensor, v: Tensor, forward_batch: Any
    ) -> tuple[Tensor, Tensor, Encoded | None, Encoded | None]:
        if layer_id not in self.quantized_layers:
            return k, v, None, None
        context = QuantContext(
            head_ids=self.geometry.kv_head_ids,
            head_dim=self.geometry.head_dim,
            rotary=self.geometry.rotary,
            storage_dtype=self.geometry.pool_dtype,
            row_ids=self.row_ids[forward_batch.out_cache_loc],
            dither_key=self.dither_key,
        )
        positions = forward_batch.positions
        results: list[tuple[Tensor, Encoded | None]] = []
        for kind, given in (("k", k), ("v", v)):
            # A copy: a quantizer that wrote into its input would be measured against its own result.
            exact = given.to(torch.float32, copy=True)
            ctx = context if kind == "k" else replace(context, head_dim=self.geometry.v_head_dim)
            if isinstance(self.quantizer, DitheredQuantizer):
                codes = self.quantizer.encode(exact, kind=kind, layer=layer_id, positions=positions, ctx=ctx)  # type: ignore[arg-type]
                results.append((codes.values.to(given.dtype), codes))
            else:
                fake = self.quantizer.fake_quantize(exact, kind=kind, layer=layer_id, positions=positions, ctx=ctx)  # type: ignore[arg-type]
                results.append((fake.to(given.dtype), None))
        (quantized_k, codes_k), (quantized_v, codes_v) = results
        return quantized_k, quantized_v, codes_k, codes_v

    def _account(
        self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor, codes_k: Encoded | None, codes_v: Encoded | None
    ) -> None:
        if self.shadow is not None:
            self.shadow.put(layer_id, slots, k, v)
        self.store.write(
            layer_id,
            slots,
            exact_k=k,
            exact_v=v,
            stored_k=self.pool.get_key_buffer(layer_id)[slots],
            stored_v=self.pool.get_value_buffer(layer_id)[slots],
            encoded_k=codes_k,
            encoded_v=codes_v,
        )

    def _measure(self, layer: Any, q: Tensor, out: Tensor, kwargs: dict[str, Any]) -> None:
        """Meter the planned rows of one layer; a repairing gate may change the cache and rows of `out`."""
        if self.plan is None or self.step is None or not self.plan.rows or layer.layer_id not in self.metered_layers:
            return
        call = LayerCall(
            layer=layer.layer_id,
            k_cache=self.pool.get_key_buffer(layer.layer_id),
            v_cache=self.pool.get_value_buffer(layer.layer_id),
            sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap,
            window_left=layer.sliding_window_size,
            sinks=kwargs.get("sinks"),
            exact_k=self.store.exact_k.get(layer.layer_id),
        )
        heads, dim = self.geometry.num_qo_heads, self.geometry.head_dim
        rows = q.reshape(-1, heads, dim)[self.plan.tokens]
        delta_loc = [self.budget.delta_loc(row.ordinal) if self.uses_dither else 0.0 for row in self.plan.rows]
        if self.repairer is None:
            measuring.observe(self.step, self.plan, call, rows, self.store, delta_loc, self.policy.meter.form)
        else:
            outputs = out.view(-1, heads, self.geometry.v_head_dim)
            measuring.gate(self.step, self.plan, call, rows, outputs, self.repairer, delta_loc)

    # Requests ---------------------------------------------------------------------------------------------------

    def finish(self, req: Any) -> dict[str, Any]:
        """The summary of a finished request; its counts are forgotten."""
        self.planner.forget(req.rid)
        if self.repairer is not None:
            self.repairer.forget(req.rid)
        reason = req.finished_reason.to_json().get("type") if req.finished_reason else "unknown"
        return self.ledger.finish(req.rid, str(reason))

    def status(self) -> dict[str, Any]:
        """What is metered, for the start-up handshake, the banner and `/witcert/status`."""
        g = self.geometry
        return {
            "quantizer": self.quantizer.name,
            "tier": "dither" if self.uses_dither else "witness",
            "backend": g.backend,
            "pool_dtype": str(g.pool_dtype).removeprefix("torch."),
            "num_layers": len(g.layers),
            "num_qo_heads": g.num_qo_heads,
            "layers_metered": sorted(self.metered_layers),
            "layers_quantized": sorted(self.quantized_layers),
            "stride": self.policy.meter.stride,
            "audit_every": self.policy.meter.audit_every,
            "prefill_reads": self.policy.prefill_reads,
            "bytes_witness": self.store.nbytes + self.row_ids.nbytes,
            "bytes_audit_copies": self.store.exact_nbytes,
            "gate": self.policy.gate.kind,
            "bytes_shadow": 0 if self.shadow is None else self.shadow.nbytes,
            "shadow_slots": 0 if self.shadow is None else self.shadow.num_rows,
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
