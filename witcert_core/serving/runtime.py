"""The meter of one scheduler process: quantizes what is written, measures what is read, keeps the ledger.

An adapter describes each forward pass (`begin`), hands over every attention call (`attend`), takes the step's cells
away (`end`) and counts them once the engine has committed the tokens (`StepCells.count`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from witcert_core.cache.protocols import Pool
from witcert_core.errors import UnsupportedError
from witcert_core.meter.budget import Budget
from witcert_core.policy.model import Policy
from witcert_core.probes.watches import Command
from witcert_core.quantizers.dither import DitherKey
from witcert_core.report.claims import SAMPLED_PREFIX
from witcert_core.report.ledger import RequestLedger, make_ledger, without_cache
from witcert_core.report.prometheus import Metrics
from witcert_core.serving.build import Buffers
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.encoder import Tables
from witcert_core.serving.forward import Pass
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.groups import CacheGroup, GroupSlots
from witcert_core.serving.models.grouped import check_groups
from witcert_core.serving.passes import MeteredRow, RequestPass, RowPlan, RowPlanner
from witcert_core.serving.probed import ProbedPass
from witcert_core.serving.ranks import Ranks
from witcert_core.serving.sampled import sampled_copies
from witcert_core.serving.sketched import sampled_sketches
from witcert_core.serving.software import versions_of
from witcert_core.serving.steps import StepCells
from witcert_core.serving.storage.attended import nothing_rewritten

LAST_PASS_ID = 2**32 - 1


class Runtime:
    """State of the metered process; built once the engine's pool exists. group_of: layer -> number of its cache group.

    engine: its name in reports. pool: the engine's, or the buffers of a packed one (`build_cache`); of all groups,
    each layer by its own group's slots. geometry: of the first cache group, others: of those beyond it, with as many
    query heads.
    keeps_ledger: false where tokens are committed in another process, which then keeps it (`make_ledger`).
    tables: the rotary embeddings of the layers, for quantizers of keys before RoPE. num_hidden_layers: of the model,
    where some of them keep no keys and values. without_law: why no request of this engine has the probabilistic tier,
    or ''.
    """

    def __init__(
        self,
        engine: str,
        policy: Policy,
        geometry: Geometry,
        pool: Pool | Buffers,
        metrics: Metrics | None,
        ranks: Ranks | None = None,
        tables: Tables | None = None,
        *,
        others: Sequence[Geometry] = (),
        num_hidden_layers: int = 0,
        keeps_ledger: bool = True,
        without_law: str = "",
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.quantizer = quantizer = policy.resolved_quantizer
        self.geometry = geometry
        geometries = (geometry, *others)
        check_groups(policy, geometries)
        self.layers = tuple(sorted(layer for group in geometries for layer in group.layers))
        self.without_cache = without_cache(self.layers, num_hidden_layers)
        self.ranks = ranks or Ranks(0, 1, None, 0)
        meter = policy.meter
        self.quantized_layers = frozenset(policy.quantizer.layers_of(self.layers))
        self.metered_layers = frozenset(meter.layers_of(self.layers))
        self.planner = RowPlanner(
            stride=policy.stride,
            # A gate that repairs must see every row that reads the cache.
            max_rows=geometry.num_slots if policy.repairs else meter.max_rows,
            audit_every=meter.audit_every,
            stored_prefill=policy.prefill_reads == "stored",
            without_law=without_law if policy.tier == "probabilistic" else "",
        )
        self.uses_dither = policy.tier == "probabilistic"
        self.budget = Budget(
            delta=meter.delta,
            num_layers=len(self.metered_layers),
            num_qo_heads=geometry.total_qo_heads,
            declared_rows=meter.declared_rows,
        )
        self._ledger: RequestLedger | None = None
        if self.ranks.reports and keeps_ledger:
            self._ledger = make_ledger(
                engine, policy, self.layers, geometry.total_qo_heads, metrics, self.without_cache
            )
        # The nonce makes the rows of two runs differ; it need not be remembered, the codes die with the pool.
        nonce = self.ranks.from_root(secrets.randbits(63))
        key = DitherKey(seed=0, nonce=nonce, dp_rank=0)
        self.sampled = sampled_copies(policy, geometry, self.ranks)
        self.sketched = sampled_sketches(policy, quantizer, geometry, self.ranks)
        rewritten = nothing_rewritten if self.sketched is None else self.sketched.rewritten
        self.groups = [CacheGroup(policy, of, pool, key, tables, rewritten) for of in geometries]
        self.group_of = {layer: number for number, of in enumerate(geometries) for layer in of.layers}
        self.passes = 0
        self.attention_calls = 0

    # One forward pass -------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[RequestPass], out_slots: Tensor, others: Sequence[GroupSlots] = ()) -> None:
        """A pass over `requests` is about to write `out_slots` [N]; slots are those of the first cache group.

        others: where the same tokens are in the groups beyond it.
        """
        if self.passes >= LAST_PASS_ID - 1:
            raise UnsupportedError(
                f"{self.passes} forward passes are done and every pass id is used; restart the server"
            )
        self.passes += 1
        self.attention_calls = 0
        plan = self.planner.plan(requests)
        places = list(zip(self.groups, [GroupSlots(plan.requests, out_slots), *others], strict=True))
        for group, slots in places:
            group.written(slots.written, plan, self.passes)
        if self.uses_dither:
            for index, length in plan.prefixes.items():
                sampled = any(group.holds_sampled(slots.requests[index][:length]) for group, slots in places)
                if index not in plan.without_law and sampled:
                    self.planner.claim_no_law(requests[index].request_id, SAMPLED_PREFIX)
                    plan.without_law[index] = SAMPLED_PREFIX
        not_audited: Counter[tuple[int, str]] = Counter()
        if self.sampled is not None:
            self.sampled.begin(requests, out_slots)
            plan, not_audited = self.sampled.plan(plan, requests)
        not_sketched: Counter[tuple[int, str]] = Counter()
        if self.sketched is not None:
            self.sketched.begin(requests, out_slots)
            plan, not_sketched = self.sketched.plan(plan, requests)
        plan = replace(plan, rows=[replace(row, delta_loc=self._delta(plan, row)) for row in plan.rows])
        step = StepCells(
            [r.request_id for r in requests],
            plan.rows,
            unmetered=plan.unmetered,
            not_audited=not_audited,
            not_sketched=not_sketched,
            without_law=plan.without_law if self.uses_dither else {},
            drafts=plan.drafts,
            probed=self._probed(requests, plan),
        )
        for group, slots in places:
            group.begin(Pass(replace(plan, requests=list(slots.requests)), step, slots.written))

    @property
    def now(self) -> Pass | None:
        """The pass that is running, as the first group sees it."""
        return self.groups[0].now

    @property
    def in_pass(self) -> bool:
        """Whether a pass with requests is running (an engine's warm-up passes carry none)."""
        return self.now is not None

    def geometry_of(self, layer: int) -> Geometry:
        """The shape of the cache group that a layer belongs to."""
        return self.groups[self.group_of[layer]].geometry

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of one layer on quantized keys and values, with the planned rows metered."""
        self.attention_calls += 1
        group = self.groups[self.group_of[call.layer]]
        if self.sampled is not None:
            self.sampled.put(call)
        if self.sketched is None:
            return group.attend(call)
        self.sketched.put(call)
        out = group.attend(call)
        self.sketched.keep(call, group.cache.storage.stored)
        return out

    def moved(self, target: Tensor, source: Tensor, group: int = 0) -> None:
        """The engine copied what is in slots `source` [N] of a group onto `target` [N]."""
        self.groups[group].moved(target, source)
        if self.sampled is not None:
            self.sampled.drop(target)
        if self.sketched is not None:
            self.sketched.drop(target)

    def overwritten(self, slots: Tensor, group: int = 0) -> None:
        """The engine wrote `slots` [N] of a group from elsewhere."""
        self.groups[group].overwritten(slots)
        if self.sampled is not None:
            self.sampled.drop(slots)
        if self.sketched is not None:
            self.sketched.drop(slots)

    def end(self) -> StepCells | None:
        """The cells of the pass with the heads of all ranks; None on ranks that do not report.

        Raises UnsupportedError when some layer's attention never came by: serving goes on unmetered otherwise.
        """
        now = self.now
        self.abandon()
        if self.attention_calls != len(self.layers):
            raise UnsupportedError(
                f"{self.attention_calls} metered attention calls in a pass over {len(self.layers)} layers: "
                "some attention bypasses the meter, so nothing is served"
            )
        if now is None:
            return None
        now.step.settle()
        return self.ranks.collect(now.step)

    def abandon(self) -> None:
        """The pass failed in the model: nothing of it is counted, and what it wrote belongs to nobody."""
        for group in self.groups:
            group.now = None

    def _delta(self, plan: RowPlan, row: MeteredRow) -> float:
        """Failure probability each cell of a metered row may spend; 0 under the deterministic tier."""
        spends = self.uses_dither and row.charged and row.request not in plan.without_law
        return self.budget.delta_loc(row.charged) if spends else 0.0

    @property
    def ledger(self) -> RequestLedger:
        """The counts of the requests; UnsupportedError where another process keeps them."""
        if self._ledger is None:
            raise UnsupportedError("the ledger of this pass is kept by another process, which commits its tokens")
        return self._ledger

    # Probes -----------------------------------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        """Enable, end or forget a probe, from the next pass on. All ranks are told between the same two passes."""
        self.planner.watches.command(command)
        if self._ledger is not None:
            self._ledger.probes.command(command)

    def _probed(self, requests: Sequence[RequestPass], plan: RowPlan) -> ProbedPass:
        if not self.planner.watches:
            return ProbedPass()
        facts: list[dict[str, str | int]] = [{"request": r.request_id, **r.facts} for r in requests]
        return ProbedPass(facts, plan.lost, self.planner.watches.ended())

    # Requests ---------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: str) -> dict[str, Any]:
        """The summary of a finished request (empty without a ledger here); its counts are forgotten."""
        self.forget(request_id)
        return {} if self._ledger is None else self._ledger.finish(request_id, reason)

    def forget(self, request_id: str) -> None:
        """Drop the running counts of a finished request."""
        self.planner.forget(request_id)
        for group in self.groups:
            group.cache.forget(request_id)
        if self.sampled is not None:
            self.sampled.forget(request_id)
        if self.sketched is not None:
            self.sketched.forget(request_id)

    def status(self) -> dict[str, Any]:
        """What is metered, for the start-up handshake, the banner and `/witcert/status`."""
        g, storages = self.geometry, [group.cache.storage for group in self.groups]
        said: Counter[str] = Counter()
        for storage in storages:
            said.update(storage.status())
        return {
            "versions": versions_of(self.engine),
            "quantizer": self.quantizer.name,
            "tier": "probabilistic" if self.uses_dither and not self.planner.without_law else "deterministic",
            "backend": g.backend,
            "pool_dtype": str(g.pool_dtype).removeprefix("torch."),
            "num_layers": len(self.layers),
            "layers_without_cache": list(self.without_cache),
            "num_qo_heads": g.total_qo_heads,
            "latent_dim": g.rotary.latent_dim,
            "num_ranks": self.ranks.size,
            "layers_metered": sorted(self.metered_layers),
            "layers_quantized": sorted(self.quantized_layers),
            "stride": self.policy.stride,
            "audit_every": self.policy.meter.audit_every,
            "audit_share": self.policy.meter.audit_share,
            "bytes_sample": 0 if self.sampled is None else self.sampled.nbytes,
            "sample_tokens": 0 if self.sampled is None else self.sampled.copies.num_copies,
            "sketch_share": self.policy.meter.sketch_share,
            "bytes_sketches": 0 if self.sketched is None else self.sketched.nbytes,
            "sketch_tokens": 0 if self.sketched is None else self.sketched.index.num_copies,
            "prefill_reads": self.policy.prefill_reads,
            "bytes_witness": sum(storage.bytes_side for storage in storages) + sum(x.nbytes for x in self.groups),
            "bytes_audit_copies": sum(storage.bytes_audit for storage in storages),
            "gate": self.policy.gate.kind,
            "storage": self.policy.quantizer.storage,
            "kernels": "; ".join(dict.fromkeys(group.cache.kernels for group in self.groups)),
            **said,
        }
