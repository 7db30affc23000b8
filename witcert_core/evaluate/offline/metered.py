"""A user's own transformers model, metered for the length of a `with` block, whatever generates with it.

Hooks on its forward pass say which places of a batch hold tokens; attention and the cache are exchanged for ours. What
cannot be followed is refused by name.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline import batches, bridge
from witcert_core.evaluate.offline.batches import Batch, MeteredCache
from witcert_core.evaluate.offline.model import check_config, wrap_model
from witcert_core.evaluate.offline.passes import BatchPass, Passes
from witcert_core.evaluate.offline.turn import Turn
from witcert_core.policy.model import Policy
from witcert_core.report.text import render_sentence, render_table
from witcert_core.serving.runtime import Runtime

ENGINE = "transformers"
PADDING = "padding"
"""Why a row is unknown whose token `generate` samples at a place of padding."""
_WIDTH = 160
_metered: list[MeteredModel] = []


@dataclass(frozen=True)
class _Pass:
    """The forward pass that is running: what of it is committed to its batch once it is through."""

    cache: MeteredCache
    mask: Tensor
    new_slots: list[Tensor]
    computed: BatchPass


class MeteredModel:
    """A model under the meter, between `__enter__` and `__exit__`; requests are numbered in the order they began."""

    def __init__(self, model: Any, policy: Policy, max_tokens: int) -> None:
        if policy.gate.on_exhausted == "abort":
            raise UnsupportedError(
                "gate.on_exhausted is 'abort', but one request of a batch cannot be ended alone; set it to 'serve'"
            )
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise InputError(
                f"max_tokens is {max_tokens!r}; expected room for the tokens of a batch, an integer from 1"
            )
        self.policy = policy
        self.max_tokens = max_tokens
        self._model = model
        self._passes: Passes | None = None
        self._ids: list[str] = []
        self._summaries: dict[int, dict[str, Any]] = {}
        self._reasons: dict[int, str] = {}
        self._running: list[tuple[weakref.ref[MeteredCache], Batch]] = []
        self._used = torch.zeros(max_tokens, dtype=torch.bool)
        self._ends: frozenset[int] | None = None  # None outside `generate`
        self._pass: _Pass | None = None
        self._window = max_tokens  # the shortest of its layers
        self._turn = Turn()
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> MeteredModel:
        if _metered:
            raise UnsupportedError("a meter is running already; leave its block before you begin another")
        require("transformers")
        model, name = self._model, type(self._model).__name__
        if not hasattr(model, "config") or not hasattr(model, "generate"):
            raise InputError(f"the model is {name}; expected a causal language model of transformers, already loaded")
        shape = check_config(model.config, name)
        devices = {parameter.device.type for parameter in model.parameters()}
        if devices != {"cpu"}:
            raise UnsupportedError(
                f"{name} is on {', '.join(sorted(devices))}; metered here is the CPU: model.to('cpu')"
            )
        before = model.config._attn_implementation
        try:
            loaded = wrap_model(model, None, shape, name)
            self._window = min((layer.window or self.max_tokens for layer in shape.layers), default=self.max_tokens)
            self._undo += [functools.partial(model.set_attn_implementation, before), *loaded.undo]
            self._passes = Passes(ENGINE, loaded, self.policy, self.max_tokens)
            self._undo.append(model.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            self._undo.append(model.register_forward_hook(self._after, with_kwargs=True, always_call=True).remove)
            self._replace_generate()
        except BaseException:
            self._restore()
            raise
        _metered.append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _metered.remove(self)
        self._abandon()
        self._restore()
        self._collect(every=True)

    @property
    def runtime(self) -> Runtime:
        """The meter, between `__enter__` and `__exit__`; InputError before."""
        return self._checked_passes().runtime

    # What was measured ------------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The summary (schema witcert.request/1) of every request, of a running one so far."""
        self._collect()
        return [self.summary(number) for number in range(len(self._ids))]

    def summary(self, number: int) -> dict[str, Any]:
        """The summary of request `number`, counted from 0; InputError if there is none."""
        if not 0 <= number < len(self._ids):
            raise InputError(f"there is no request {number}; {len(self._ids)} have begun, counted from 0")
        if number in self._summaries:
            return self._summaries[number]
        return self.runtime.ledger.summary(self._ids[number])

    def render(self, number: int | None = None) -> str:
        """Table and sentence of one request, or of all, as text."""
        out = StringIO()
        console = Console(file=out, width=_WIDTH, color_system=None)
        for summary in self.requests if number is None else [self.summary(number)]:
            console.print(render_table(summary))
            console.print(render_sentence(summary), markup=False)
        return out.getvalue()

    # Hooks --------------------------------------------------------------------------------------------------------

    def _replace_generate(self) -> None:
        model = self._model
        plain, own = model.generate, model.__dict__.get("generate")

        @functools.wraps(plain)
        def generate(*args: Any, **kwargs: Any) -> Any:
            option = functools.partial(self._option, args, kwargs)
            batches.check_generation(option)
            self._turn.begin()
            self._ends, begun = batches.ending_tokens(option), len(self._ids)
            try:
                output = plain(*args, **kwargs)
                self._note_reasons(getattr(output, "sequences", output), begun)
                return output
            finally:
                self._ends = None
                self._turn.end()

        model.generate = generate
        self._undo.append(
            functools.partial(setattr, model, "generate", own) if own else functools.partial(delattr, model, "generate")
        )

    def _option(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """What `generate` takes for an option: an argument, the configuration given, or the model's."""
        if name in kwargs:
            return kwargs[name]
        given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        found = getattr(given, name, None)
        return getattr(self._model.generation_config, name, None) if found is None else found

    def _note_reasons(self, sequences: Any, begun: int) -> None:
        """Why the requests ended that began with request `begun`, from what `generate` gives back."""
        for _, batch in self._running:
            if batch.requests.start >= begun and len(batch.requests) == len(sequences):
                for number, made in zip(batch.requests, sequences[:, -(batch.decoded + 1) :].tolist(), strict=True):
                    self._reasons[number] = "stop" if self._ends and self._ends.intersection(made) else "length"

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """A forward pass begins: announce it, and exchange its cache for ours."""
        self._turn.begin()
        self._abandon()
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        argument, name = bridge.cache_argument(model), type(model).__name__
        batches.check_inputs(given, argument, name)
        ids = given.get("input_ids")
        shown = ids if ids is not None else given.get("inputs_embeds")
        if not isinstance(shown, Tensor):
            raise InputError(f"{name} is given neither input_ids nor inputs_embeds")
        size, columns = shown.shape[:2]
        cache = self._cache(given.get(argument), size)
        batch, passes = cache.batch, self._checked_passes()
        mask = batches.given_mask(given, batch, columns)
        if self._ends is not None and ids is not None and columns == 1 and batch.past:
            batch.ended |= torch.isin(ids[:, 0], torch.tensor(sorted(self._ends), dtype=ids.dtype))
        real = mask & ~batch.ended[:, None]
        batches.check_gaps(batch, mask, self._window)
        batches.check_positions(given, real, batch, passes.runtime.quantizer.space == "pre_rope")
        new_slots = self._take(real.sum(1).tolist())
        names = [self._ids[number] for number in batch.requests]
        computed = batches.batch_pass(batch, real, new_slots, names)
        self._pass = _Pass(cache, mask, new_slots, computed)
        passes.begin(computed)
        bridge.attend_with(passes)
        return (), given | {argument: cache}

    def _after(self, _model: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """The pass is through, or (without an output) failed."""
        if not self._turn.mine:
            return  # it was refused
        if self._ends is None:
            self._turn.end()
        running = self._pass
        if running is None:
            return
        if output is None:
            self._abandon()
            return
        self._pass = None
        bridge.attend_with(None)
        passes, batch = self._checked_passes(), running.cache.batch
        passes.end()
        columns = running.mask.shape[1]
        for number, request in enumerate(running.computed.requests):
            has_prefix = request.slots.numel() > request.new_tokens
            reads_stored = has_prefix or self.policy.prefill_reads == "stored"
            if number in running.computed.behind and reads_stored:
                passes.runtime.ledger.count_unknown(request.request_id, 1, PADDING)
        batch.slots = [torch.cat(both) for both in zip(batch.slots, running.new_slots, strict=True)]
        batch.decoded += columns == 1 and batch.past > 0
        batch.mask = torch.cat([batch.mask, running.mask], 1)
        running.cache.length = batch.past

    def _abandon(self) -> None:
        if self._pass is None:
            return
        self._used[torch.cat(self._pass.new_slots)] = False
        self._pass = None
        bridge.attend_with(None)
        self._checked_passes().abandon()

    # Requests and slots -------------------------------------------------------------------------------------------

    def _cache(self, given: Any, size: int) -> MeteredCache:
        """Ours, or a new one in place of an empty one of transformers'."""
        if isinstance(given, MeteredCache):
            if given.closed:
                raise UnsupportedError(batches.CLOSED)
            return given
        if given is not None and int(given.get_seq_length()) > 0:
            raise UnsupportedError(
                "the cache was filled outside the meter, so that nothing is known of its errors; begin with the whole "
                "prompt"
            )
        self._collect()
        batch = Batch.empty(len(self._ids), size)
        self._ids += [f"request-{number}" for number in batch.requests]
        cache = MeteredCache(batch)
        self._running.append((weakref.ref(cache), batch))
        return cache

    def _take(self, counts: list[int]) -> list[Tensor]:
        """Free slots for so many new tokens of each request."""
        free = (~self._used).nonzero()[:, 0]
        if free.numel() < sum(counts):
            gc.collect()  # a cache that nobody uses may wait for it
            self._collect()
            free = (~self._used).nonzero()[:, 0]
        if free.numel() < sum(counts):
            raise InputError(
                f"the meter has room for {self.max_tokens} tokens, {free.numel()} of them free, and the pass brings "
                f"{sum(counts)}; begin it with a larger max_tokens, or let go of caches you keep"
            )
        taken = free[: sum(counts)]
        self._used[taken] = True
        return list(torch.split(taken, counts))

    def _collect(self, every: bool = False) -> None:
        """Finish the requests whose cache nobody has any more, or `every` one."""
        for entry in list(self._running):
            cache, batch = entry[0](), entry[1]
            if cache is not None and not every:
                continue
            if cache is not None:
                cache.closed = True
            self._running.remove(entry)
            self._used[torch.cat(batch.slots)] = False
            for number in batch.requests:
                reason = self._reasons.pop(number, "ended")
                self._summaries[number] = self._checked_passes().runtime.finish(self._ids[number], reason)

    def _checked_passes(self) -> Passes:
        if self._passes is None:
            raise InputError("nothing is metered yet; use the meter in a `with` block")
        return self._passes

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
