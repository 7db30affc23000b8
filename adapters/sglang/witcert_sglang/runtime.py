"""SGLang's forward passes and attention calls as the runtime of the core takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from witcert_core import AttentionSpec, Policy
from witcert_core.errors import UnsupportedError
from witcert_core.serving import (
    AttentionCall,
    Buffers,
    CapturedDecode,
    Geometry,
    GroupSlots,
    Metrics,
    PackedStorage,
    Ranks,
    RequestPass,
    Runtime,
    StepCells,
    Tables,
)
from witcert_sglang import windows
from witcert_sglang.graphs import DecodeGraphs, requests_on_device, will_replay
from witcert_sglang.packed import packed_layers
from witcert_sglang.pool import EnginePool, SlotPool
from witcert_sglang.results import StepOutput, send_along
from witcert_sglang.sub_pools import sub_pools


class SglangRuntime(Runtime):
    """The metered scheduler process; built when the attention backend is, once the pool exists."""

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        pool: Any,
        metrics: Metrics | None,
        ranks: Ranks | None = None,
        scales: Mapping[int, tuple[float, float]] | None = None,
        tables: Tables | None = None,
        requests: Any = None,
        others: Sequence[Geometry] = (),
        num_hidden_layers: int = 0,
        without_law: str = "",
    ) -> None:
        """scales: of a pool that SGLang quantizes itself, see `EnginePool`. tables: see `Encoder`.

        requests: SGLang's `ReqToTokenPool`, which captured graphs take page tables from. geometry, others: of each of
        `sub_pools(pool)`.
        """
        self.pool = pool
        self.requests = requests
        self.graphs: DecodeGraphs | None = None
        self.facts: dict[str, dict[str, str | int]] = {}  # of the requests of the next pass, where probes are enabled
        self.compared: list[str] = []  # passes of the attention backends that were compared with float64 at start

        read: SlotPool | Buffers = SlotPool(pool)
        if policy.quantizer.storage == "packed":
            read = packed_layers(pool)
        elif policy.meters_engine:
            read = EnginePool(pool, geometry.pool_dtype, scales or {})
        more: dict[str, Any] = {"others": others, "num_hidden_layers": num_hidden_layers, "without_law": without_law}
        super().__init__("sglang", policy, geometry, read, metrics, ranks, tables, **more)

    def status(self) -> dict[str, Any]:
        """As in the core; the pool's dtype is the one SGLang stores in where its own cache is metered."""
        found = super().status()
        if self.policy.meters_engine:
            found["pool_dtype"] = str(self.pool.dtype).removeprefix("torch.")
        found["attention_compared"] = list(self.compared)
        found["bytes_graphs"] = 0 if self.graphs is None else self.graphs.captured.nbytes
        return found

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `ModelRunner.forward`: plans the rows, lets the pass run, sends the cells along with its logits."""
        if forward_batch.forward_mode.is_idle() or not forward_batch.rids:
            return original(runner, forward_batch, *args, **kwargs)
        replays = self.graphs is not None and will_replay(runner, forward_batch)
        # Whose prefix is still to be looked at (probabilistic tier) needs its slots here: twice a request.
        looked = not self.uses_dither or all(self.planner.knows_prefix(rid) for rid in forward_batch.rids)
        if replays and looked:
            requests = requests_on_device(forward_batch)
        else:
            generates = forward_batch.forward_mode.is_decode() or forward_batch.forward_mode.is_target_verify()
            reads_stored = generates or self.policy.prefill_reads == "stored"
            requests = requests_of(forward_batch, runner.req_to_token_pool.req_to_token, reads_stored)
        if self.planner.watches:
            requests = [replace(one, facts=self.facts.get(one.request_id, {})) for one in requests]
        self.begin_pass(requests, forward_batch.out_cache_loc)
        if replays and self.graphs is not None:
            self.graphs.begin()
        try:
            output = original(runner, forward_batch, *args, **kwargs)
        except BaseException:
            self.abandon()
            raise
        step = self.end_replay() if replays else self.end()
        if output.logits_output is not None and step is not None:
            travelling = StepOutput(self, step)
            output.logits_output.witcert_step = travelling
            # Scoring mostly samples nothing, and drafts are judged apart, so nothing else would send it.
            if forward_batch.is_prefill_only or forward_batch.forward_mode.is_target_verify():
                send_along(output.logits_output, travelling)
        return output

    def begin_pass(self, requests: Sequence[RequestPass], out_slots: Tensor) -> None:
        """As `begin`; slots are those of SGLang's tables."""
        first, *others = (self._in_group(group.geometry, requests, out_slots) for group in self.groups)
        requests = [replace(request, slots=own) for request, own in zip(requests, first.requests, strict=True)]
        self.begin(requests, first.written, others)

    def _in_group(self, geometry: Geometry, requests: Sequence[RequestPass], out_slots: Tensor) -> GroupSlots:
        """Where the tokens are in a pool of layers with a window, if the group is one; what has left it is nowhere."""
        if geometry.window is None:
            return GroupSlots([request.slots for request in requests], out_slots)
        tables = []
        for request in requests:
            own = self.pool.translate_loc_from_full_to_swa(request.slots).to(torch.int64)
            own[: max(own.numel() - request.new_tokens - geometry.window, 0)] = 0
            tables.append(own)
        return GroupSlots(tables, self.pool.translate_loc_from_full_to_swa(out_slots).to(torch.int64))

    def sub_pool(self, pool: Any) -> int | None:
        """The number of the cache group that SGLang's `pool` is; None for one that is not metered."""
        found = [number for number, sub in enumerate(sub_pools(self.pool)) if sub.pool is pool]
        return found[0] if found else None

    # Captured graphs --------------------------------------------------------------------------------------------

    def init_graphs(self, max_bs: int, max_num_tokens: int) -> None:
        """SGLang is about to capture graphs of up to `max_bs` requests."""
        storage = self.groups[0].cache.storage
        if not isinstance(storage, PackedStorage) or max_num_tokens != max_bs or self.requests is None:
            raise UnsupportedError(
                "captured graphs are metered for a packed pool read by kernels, one token a request; add "
                "--disable-cuda-graph"
            )
        longest = self.requests.req_to_token.shape[1]
        self.graphs = DecodeGraphs(CapturedDecode(storage, max_bs, longest, uses_dither=self.uses_dither))

    def eager(self) -> None:
        """Passes are not captured from here on."""
        if self.graphs is not None:
            self.graphs.captured.capturing = None

    def begin_capture(self, rows: int) -> None:
        self._live_graphs().captured.begin_capture(rows)

    def prepare_replay(self, batch: Any) -> None:
        self._live_graphs().prepare(batch, self.requests.req_to_token, self.now)

    def end_replay(self) -> StepCells | None:
        """As `end`, for a pass in which the launches of a graph ran in place of Python."""
        graphs = self._live_graphs()
        padding = graphs.finish()
        if self.now is not None:
            graphs.captured.read(self.now, self.policy.meter.form, padding=padding)
        self.attention_calls = len(self.layers)  # `load` has seen that the graph holds them all
        return self.end()

    def _live_graphs(self) -> DecodeGraphs:
        if self.graphs is None:
            raise UnsupportedError("SGLang captures graphs without having said so; add --disable-cuda-graph")
        return self.graphs

    def attend_layer(
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
        backend: type[Any],
    ) -> Tensor:
        """One call of `forward_decode` or `forward_extend` of SGLang's own `backend` class."""
        capturing = self.graphs is not None and self.graphs.captured.capturing is not None
        if not self.in_pass and not capturing:  # warm-up passes of the engine carry no requests
            return attention(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        if self.geometry.latent and layer.qk_head_dim != self.geometry.head_dim:
            out = attention(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
            self._written_aside(layer, forward_batch, q)
            return out
        if k is None or v is None or not save_kv_cache:
            raise UnsupportedError(
                f"layer {layer.layer_id} attends without writing its keys through the pool (a fused write or shared "
                "KV): what is stored cannot be metered; unset WITCERT_POLICY for this model"
            )
        if odd := sorted(set(kwargs) - {"sinks"}):
            raise UnsupportedError(
                f"layer {layer.layer_id} passes {odd} to its attention, which the meter does not follow"
            )
        g, packed = self.geometry_of(layer.layer_id), self.policy.quantizer.storage == "packed"
        now = self.groups[self.group_of[layer.layer_id]].now

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            k_in, v_in = (k, v) if own_k is None else (own_k, own_v)
            return attention(q, k_in, v_in, layer, forward_batch, save_kv_cache=True, **kwargs)

        spec = AttentionSpec(
            sm_scale=layer.scaling,
            logits_soft_cap=layer.logit_cap,
            # A packed pool is attended by ours, over the model's own window; any other by the engine's kernel.
            window_left=layer.sliding_window_size if packed else windows.window_left(backend, layer, is_decode),
            sinks=kwargs.get("sinks"),
            arithmetic=windows.arithmetic(backend, q.dtype, g.pool_dtype),
        )
        call = AttentionCall(
            layer=layer.layer_id,
            q=q.reshape(-1, g.num_qo_heads, g.head_dim),
            # Exact is what a plain pool would have held: rounding to its dtype is not the quantizer's doing, and
            # must come first, or the dither's radius would miss it.
            exact_k=k.reshape(-1, g.num_kv_heads, g.head_dim).to(g.pool_dtype),
            exact_v=v.reshape(-1, g.num_kv_heads, g.v_head_dim).to(g.pool_dtype),
            slots=forward_batch.out_cache_loc if now is None else now.slots,
            positions=forward_batch.positions,
            spec=spec,
            run=run,
        )
        if capturing and self.graphs is not None and not self.in_pass:
            return self.graphs.captured.attend(call)
        return self.attend(call)

    def _written_aside(self, layer: Any, forward_batch: Any, q: Tensor) -> None:
        """A chunk attended to keys and values of heads that were multiplied out of its own latents. These are in the
        pool already, exactly: they are accounted for, and nobody's rows are measured."""
        g = self.geometry
        plan = self.now and self.now.plan
        if plan and any(len(seen) > new for seen, new in zip(plan.requests, plan.new_tokens, strict=True)):
            raise UnsupportedError(
                f"layer {layer.layer_id} reads a prefix whose latents were multiplied out, which the meter does not "
                "follow; use --attention-backend triton"
            )
        slots = forward_batch.out_cache_loc
        rows, values = self.groups[0].cache.storage.stored(layer.layer_id, slots)
        nobody = q.new_zeros(1, g.num_qo_heads, g.head_dim)
        self.attend(
            AttentionCall(
                layer=layer.layer_id,
                q=nobody,
                exact_k=rows,
                exact_v=values,
                slots=slots,
                positions=forward_batch.positions,
                spec=AttentionSpec(sm_scale=layer.scaling),
                run=lambda _k, _v: nobody[..., : g.v_head_dim].contiguous(),
            )
        )


def requests_of(batch: Any, req_to_token: Tensor, reads_stored: bool) -> list[RequestPass]:
    """The requests of `batch`; req_to_token [REQUESTS, MAX_CONTEXT] maps a request's positions to slots.

    reads_stored: whether its tokens read their quantized selves. Generated ones in a batch with prompts do not: SGLang
    extends them all.
    """
    rids, mode = batch.rids or [], batch.forward_mode
    verified = verified_tokens(batch)
    if mode.is_decode() or verified:
        new_tokens = [verified or 1] * len(rids)
    else:
        new_tokens = [int(n) for n in batch.extend_seq_lens.tolist()]
    # A batch that mixes prompts with generated tokens does not say which is which.
    prefilling = None if mode.is_mixed() else not (mode.is_decode() or verified)
    places = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    # Lengths are without the tokens that are verified.
    slots = [req_to_token[place, : length + verified].to(torch.int64) for place, length in places]
    return [
        RequestPass(rid, mine, new, prefilling, reads_stored, drafts=max(verified - 1, 0))
        for rid, mine, new in zip(rids, slots, new_tokens, strict=True)
    ]


def verified_tokens(batch: Any) -> int:
    """How many tokens of each request a pass verifies: the newest, and a chain of drafts behind it; 0 in other passes.

    UnsupportedError for a tree of drafts.
    """
    if not batch.forward_mode.is_target_verify():
        return 0
    chosen = batch.spec_info
    if chosen.topk != 1:
        raise UnsupportedError(
            f"a pass verifies a tree of drafts ({type(chosen).__name__} with topk {chosen.topk}), whose rows see their "
            "ancestors only; use --speculative-eagle-topk 1"
        )
    return int(chosen.draft_token_num)
