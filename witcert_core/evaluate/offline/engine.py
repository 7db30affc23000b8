"""One request at a time through transformers, quantized, metered and gated by the same runtime as in a server.

Shapes: N new tokens, S all tokens of the request, H query heads, Hkv KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from witcert_core.cache.schedule import QuantizeSchedule
from witcert_core.errors import InputError
from witcert_core.evaluate.offline import bridge
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.offline.passes import BatchPass, Passes, Probe
from witcert_core.evaluate.offline.prompts import PromptPass, StoredLayer
from witcert_core.policy.model import Policy
from witcert_core.serving.passes import RequestPass

ENGINE = "offline"


@dataclass(frozen=True)
class Answer:
    """Greedy output of a request and its summary (schema witcert.request/1)."""

    ids: list[int]
    text: str
    summary: dict[str, Any]


class OfflineEngine:
    """Runs `loaded` under `policy`; no request may be longer than `max_tokens`, answer included."""

    def __init__(self, loaded: LoadedModel, policy: Policy, max_tokens: int, probe: Probe | None = None) -> None:
        self.loaded = loaded
        self.policy = policy
        self.max_tokens = max_tokens
        self.passes = Passes(ENGINE, loaded, policy, max_tokens, probe)
        self.runtime = self.passes.runtime
        self._cache_argument = bridge.cache_argument(loaded.model)
        self._length = 0
        self._request_id = ""
        self._facts: dict[str, str | int] = {}
        self._gave_up = ""

    # Requests ---------------------------------------------------------------------------------------------------

    def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Greedy decoding: the prompt in one pass, then a token a pass, each reading what is stored.

        Under `gate.on_exhausted: abort` it ends where a gate gives up, before the token that row would have given.
        """
        self._start(request_id, len(prompt_ids) + max_new_tokens, len(prompt_ids))
        logits = self._prompt(prompt_ids)
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
        self._start(request_id, len(prompt_ids) + len(answer_ids), len(prompt_ids))
        logits = self._prompt(prompt_ids)
        fed = answer_ids[:-1]
        for size in QuantizeSchedule.of(self.runtime.quantizer).passes(len(prompt_ids), len(fed)):
            done = len(logits) - 1
            logits = torch.cat([logits, self.forward(fed[done : done + size], attends_quantized=True)])
        return logits, self.runtime.finish(request_id, "forced")

    def _start(self, request_id: str, num_tokens: int, prompt_tokens: int | None = None) -> None:
        if num_tokens > self.max_tokens:
            raise InputError(f"the request takes up to {num_tokens} tokens; this engine has room for {self.max_tokens}")
        self._length = 0
        self._request_id = request_id
        self._facts = {} if prompt_tokens is None else {"prompt": prompt_tokens}
        self._gave_up = ""

    def _prompt(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] after the prompt. It is computed once where its rows read exact keys, under every policy."""
        if self.policy.prefill_reads == "stored":
            return self.forward(ids)[-1:]
        kept = self.loaded.prompts.get(ids)
        if kept is None:
            recorded: list[StoredLayer] = []
            self.passes.recorded = recorded
            try:
                logits = self.forward(ids, last_only=True)[-1:].clone()
            finally:
                self.passes.recorded = None
            self.loaded.prompts.put(ids, PromptPass(recorded, logits))
            return logits
        slots = torch.arange(len(ids))
        self.passes.begin(BatchPass([RequestPass(self._request_id, slots, len(ids), facts=self._facts)], slots))
        for layer in kept.layers:
            self.passes.store(layer.layer, layer.k, layer.v, layer.spec)
        self.passes.end()
        self._length = len(ids)
        return kept.logits

    # One forward pass -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, ids: Sequence[int], attends_quantized: bool = False, last_only: bool = False) -> Tensor:
        """Logits [N, V] float32 of the request's next N tokens; a single one after the first always reads the cache.

        last_only: those of the last token are enough, so that of a model that can leave out the others N is 1.
        """
        first, count = self._length, len(ids)
        slots = torch.arange(first + count)
        reads = attends_quantized or None
        request = RequestPass(self._request_id, slots, count, attends_quantized=reads, facts=self._facts)
        self.passes.begin(BatchPass([request], torch.arange(count)))
        with bridge.running(self.passes):
            out = self.loaded.model(
                input_ids=torch.tensor([list(ids)]).to(self.loaded.device),
                position_ids=slots[None, first:].to(self.loaded.device),
                use_cache=True,
                **(self.loaded.keeps_logits if last_only else {}),
                **{self._cache_argument: bridge.CountingCache(first)},
            )
        self._gave_up = self.passes.end().get(0, "") or self._gave_up
        self._length += count
        logits: Tensor = out.logits[0].float().to("cpu")
        return logits
