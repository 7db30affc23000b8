"""One request at a time through transformers, quantized, metered and gated by the same runtime as in a server.

Shapes: N new tokens, S all tokens of the request, H query heads, Hkv KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.offline import bridge
from witcert_core.evaluate.offline.attention import causal_attention
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.offline.pool import TensorPool
from witcert_core.evaluate.offline.rotary import rotary_tables
from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.passes import RequestPass, RowPlan
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.storage.simulated import SimulatedCache

ENGINE = "offline"
Probe = Callable[[AttentionCall, RowPlan, SimulatedCache], None]
"""Called after every attention call with metered rows, with the cache as they left it."""


@dataclass(frozen=True)
class Answer:
    """Greedy output of a request and its summary (schema witcert.request/1)."""

    ids: list[int]
    text: str
    summary: dict[str, Any]


class OfflineEngine:
    """Runs `loaded` under `policy`; no request may be longer than `max_tokens`, answer included."""

    def __init__(self, loaded: LoadedModel, policy: Policy, max_tokens: int, probe: Probe | None = None) -> None:
        if policy.quantizer.storage != "simulated":
            raise UnsupportedError(
                f"quantizer.storage is {policy.quantizer.storage!r}; offline the cache is simulated: set 'simulated'"
            )
        self.loaded = loaded
        self.policy = policy
        self.max_tokens = max_tokens
        geometry = loaded.geometry(max_tokens)
        self.pool = TensorPool(geometry)
        self.cache: SimulatedCache | None = None
        self.probe = probe

        def make_cache(encoder: Any) -> SimulatedCache:
            self.cache = SimulatedCache(policy, geometry, self.pool, encoder)
            return self.cache

        quantizer = policy.resolved_quantizer
        tables = None
        if quantizer.space == "pre_rope":
            tables = rotary_tables(loaded.model, geometry.head_dim, max_tokens)
        self.runtime = Runtime(ENGINE, policy, quantizer, geometry, make_cache, None, tables=tables)
        self._cache_argument = bridge.cache_argument(loaded.model)
        self._length = 0
        self._request_id = ""
        self._reads_stored = False
        self._gave_up = ""

    # Requests ---------------------------------------------------------------------------------------------------

    def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Greedy decoding: the prompt in one pass, then a token a pass, each reading what is stored.

        Under `gate.on_exhausted: abort` it ends where a gate gives up, before the token that row would have given.
        """
        self._start(request_id, len(prompt_ids) + max_new_tokens)
        logits = self.forward(prompt_ids)
        ids: list[int] = []
        while len(ids) < max_new_tokens:
            ids.append(int(logits[-1].argmax()))
            if ids[-1] in self.loaded.eos or len(ids) == max_new_tokens:
                break
            logits = self.forward(ids[-1:])
            if self._gave_up and self.policy.gate.on_exhausted == "abort":
                break
        reason = "stop" if ids and ids[-1] in self.loaded.eos else "length"
        if self._gave_up and self.policy.gate.on_exhausted == "abort":
            reason = "abort"
        return Answer(ids, self.loaded.decode(ids), self.runtime.finish(request_id, reason))

    def force(
        self, request_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [len(answer_ids), V] before each token of a given answer, and the request's summary.

        The answer goes in as one chunk that reads what is stored, which is what decoding it would have read; in more
        where the quantizer closes tokens on the way, so that rows of one chunk would read others:
        `QuantizeSchedule.passes`.
        """
        if not answer_ids:
            raise InputError("an answer that is fed in needs at least one token")
        self._start(request_id, len(prompt_ids) + len(answer_ids))
        logits = self.forward(prompt_ids)[-1:]
        fed = answer_ids[:-1]
        for size in QuantizeSchedule.of(self.runtime.quantizer).passes(len(prompt_ids), len(fed)):
            done = len(logits) - 1
            logits = torch.cat([logits, self.forward(fed[done : done + size], attends_quantized=True)])
        return logits, self.runtime.finish(request_id, "forced")

    def _start(self, request_id: str, num_tokens: int) -> None:
        if num_tokens > self.max_tokens:
            raise InputError(f"the request takes up to {num_tokens} tokens; this engine has room for {self.max_tokens}")
        self._length = 0
        self._request_id = request_id
        self._gave_up = ""

    # One forward pass -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, ids: Sequence[int], attends_quantized: bool = False) -> Tensor:
        """Logits [N, V] float32 of the request's next N tokens; a single one after the first always reads the cache."""
        first, count = self._length, len(ids)
        slots = torch.arange(first + count)
        self._reads_stored = attends_quantized or self.policy.prefill_reads == "stored" or (count == 1 and first > 0)
        self.runtime.begin([RequestPass(self._request_id, slots, count)], slots[first:])
        with bridge.running(self):
            out = self.loaded.model(
                input_ids=torch.tensor([list(ids)]),
                position_ids=slots[None, first:],
                use_cache=True,
                **{self._cache_argument: bridge.CountingCache(first)},
            )
        step = self.runtime.end()
        if step is not None:
            self._gave_up = step.count(self.runtime.ledger, {0}).get(0, "") or self._gave_up
        self._length += count
        logits: Tensor = out.logits[0].float()
        return logits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """One layer of the pass that is running; see `bridge.Engine`."""
        seen = torch.arange(self._length + q.shape[0])
        slots = seen[self._length :]
        dtype = self.runtime.geometry.pool_dtype
        exact_k, exact_v = k.to(dtype), v.to(dtype)

        def run(new_k: Tensor | None, new_v: Tensor | None) -> Tensor:
            pair = (exact_k, exact_v) if new_k is None or new_v is None else (new_k, new_v)
            self.pool.write(layer, slots, *pair)
            return causal_attention(q, *self.pool.read(layer, seen), spec)

        call = AttentionCall(
            layer=layer,
            q=q,
            exact_k=exact_k,
            exact_v=exact_v,
            slots=slots,
            positions=slots,
            spec=spec,
            run=run,
            attends_quantized=self._reads_stored,
        )
        plan = self.runtime.plan
        out = self.runtime.attend(call)
        if self.probe is not None and plan is not None and plan.rows and self.cache is not None:
            self.probe(call, plan, self.cache)
        return out
