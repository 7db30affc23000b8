"""The meter of one SGLang scheduler process: quantizes what is written, measures what is read, keeps the ledger."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from witcert_core.budget import Budget
from witcert_core.dither import DitherKey
from witcert_core.errors import QuantizerError, UnsupportedError
from witcert_core.policy import Policy
from witcert_core.quantizers.base import DitheredQuantizer, QuantContext, Quantizer
from witcert_core.report.jsonl import JsonlWriter
from witcert_core.report.prometheus import Metrics
from witcert_core.report.summary import RequestLedger
from witcert_sglang.calls import AttentionCall, Coded
from witcert_sglang.geometry import Geometry
from witcert_sglang.packed import PackedStorage
from witcert_sglang.ranks import Ranks
from witcert_sglang.results import StepCells, send_along
from witcert_sglang.rows import RowPlan, RowPlanner
from witcert_sglang.simulated import SimulatedCache

LAST_ROW_ID = 2**32 - 1


class Runtime:
    """State of the metered scheduler process; built when the attention backend is, once the pool exists."""

    def __init__(
        self,
        policy: Policy,
        quantizer: Quantizer,
        geometry: Geometry,
        pool: Any,
        metrics: Metrics | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.quantizer = quantizer
        self.geometry = geometry
        self.pool = pool
        self.ranks = ranks or Ranks(0, 1, None, 0)
        meter = policy.meter
        self.quantized_layers = frozenset(policy.quantizer.layers_of(geometry.layers))
        self.metered_layers = frozenset(meter.layers_of(geometry.layers))
        self.planner = RowPlanner(
            stride=meter.stride,
            # A gate that repairs must see every row that reads the cache.
            max_rows=geometry.num_slots if policy.repairs else meter.max_rows,
            audit_every=meter.audit_every,
            stored_prefill=policy.prefill_reads == "stored",
        )
        self.uses_dither = quantizer.tier == "dither" and meter.tier != "witness"
        self.budget = Budget(
            delta=meter.delta,
            num_layers=len(self.metered_layers),
            num_qo_heads=geometry.total_qo_heads,
            declared_rows=meter.declared_rows,
        )
        self.ledger = RequestLedger(
            policy,
            engine="sglang",
            num_layers=len(geometry.layers),
            num_qo_heads=geometry.total_qo_heads,
            layers_excluded={
                layer: "left out by meter.layers" for layer in geometry.layers if layer not in self.metered_layers
            },
            jsonl=JsonlWriter(policy.report.jsonl) if policy.report.jsonl and self.ranks.reports else None,
            metrics=metrics if self.ranks.reports else None,
        )
        # The nonce makes the rows of two runs differ; it need not be remembered, the codes die with the pool.
        nonce = self.ranks.from_root(secrets.randbits(63))
        self.dither_key = DitherKey(seed=0, nonce=nonce, dp_rank=0)
        self.row_ids = torch.zeros(geometry.num_slots, dtype=torch.int64, device=geometry.device)  # 0: never written
        self.passes = 0
        self.step: StepCells | None = None
        self.plan: RowPlan | None = None
        self.attention_calls = 0
        self.cache = PackedStorage(self) if policy.quantizer.storage == "packed" else SimulatedCache(self)

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
        step = self.ranks.collect(self.step) if self.step is not None else None
        if output.logits_output is not None and step is not None:
            if forward_batch.is_prefill_only:  # scoring samples nothing, so nothing would send the step on its way
                send_along(output.logits_output, step)
            else:
                output.logits_output.witcert_step = step
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
        self.cache.begin_pass(forward_batch.out_cache_loc)
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
        """Run attention of one layer on quantized keys and values, and meter the planned rows."""
        if self.plan is None or self.step is None:  # warm-up passes of the engine carry no requests
            return attention(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        self.attention_calls += 1
        if k is None or v is None or not save_kv_cache:
            raise UnsupportedError(
                f"layer {layer.layer_id} attends without writing its keys through the pool (a fused write or shared "
                "KV): what is stored cannot be metered; unset WITCERT_POLICY for this model"
            )
        # Exact is what a plain pool would have held: rounding to its dtype is not the quantizer's doing, and must
        # come first, or the dither's radius would miss it.
        g = self.geometry
        call = AttentionCall(
            attention=attention,
            q=q,
            k=k,
            v=v,
            exact_k=k.reshape(-1, g.num_kv_heads, g.head_dim).to(g.pool_dtype),
            exact_v=v.reshape(-1, g.num_kv_heads, g.v_head_dim).to(g.pool_dtype),
            layer=layer,
            forward_batch=forward_batch,
            reads_stored=is_decode or self.policy.prefill_reads == "stored",
            kwargs=kwargs,
        )
        return self.cache.attend(call, self.plan, self.step)

    def encode(self, call: AttentionCall) -> tuple[Coded, Coded]:
        """Keys and values of a call through the quantizer."""
        g = self.geometry
        context = QuantContext(
            head_ids=g.kv_head_ids,
            head_dim=g.head_dim,
            rotary=g.rotary,
            storage_dtype=g.pool_dtype,
            row_ids=self.row_ids[call.slots],
            dither_key=self.dither_key,
        )
        positions, layer_id = call.forward_batch.positions, call.layer.layer_id

        def coded(kind: Literal["k", "v"], exact: Tensor, ctx: QuantContext) -> Coded:
            # A copy: a quantizer that wrote into its input would be measured against its own result.
            x = exact.to(torch.float32, copy=True)
            if isinstance(self.quantizer, DitheredQuantizer):
                codes = self.quantizer.encode(x, kind=kind, layer=layer_id, positions=positions, ctx=ctx)
                return Coded(codes.values, codes)
            values = self.quantizer.fake_quantize(x, kind=kind, layer=layer_id, positions=positions, ctx=ctx)
            if values.shape != exact.shape:
                raise QuantizerError(
                    f"quantizer {self.quantizer.name!r} returned {tuple(values.shape)} for {kind} of shape "
                    f"{tuple(exact.shape)} in layer {layer_id}; it must keep the shape"
                )
            return Coded(values, None)

        return coded("k", call.exact_k, context), coded("v", call.exact_v, replace(context, head_dim=g.v_head_dim))

    def deltas(self, plan: RowPlan) -> list[float]:
        """Failure probability each cell of a metered row may spend; 0 under the deterministic tier."""
        return [self.budget.delta_loc(row.ordinal) if self.uses_dither else 0.0 for row in plan.rows]

    # Requests ---------------------------------------------------------------------------------------------------

    def finish(self, req: Any) -> dict[str, Any]:
        """The summary of a finished request; its counts are forgotten."""
        self.planner.forget(req.rid)
        self.cache.forget(req.rid)
        if not self.ranks.reports:
            return {}
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
            "num_qo_heads": g.total_qo_heads,
            "num_ranks": self.ranks.size,
            "layers_metered": sorted(self.metered_layers),
            "layers_quantized": sorted(self.quantized_layers),
            "stride": self.policy.meter.stride,
            "audit_every": self.policy.meter.audit_every,
            "prefill_reads": self.policy.prefill_reads,
            "bytes_witness": self.cache.bytes_side + self.row_ids.nbytes,
            "bytes_audit_copies": self.cache.bytes_audit,
            "gate": self.policy.gate.kind,
            "storage": self.policy.quantizer.storage,
            **self.cache.status(),
        }
