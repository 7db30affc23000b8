"""Forward passes of a transformers model, of one request or a padded batch, as the runtime takes them.

Shapes: B requests side by side, COLUMNS places of each in a pass; N tokens of all requests in it, S tokens of a request
so far; H query heads, Hkv KV heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline.attention import causal_attention
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.offline.pool import TensorPool
from witcert_core.evaluate.offline.prompts import StoredLayer
from witcert_core.evaluate.offline.rotary import rotary_tables
from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import Policy
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.groups import GroupSlots
from witcert_core.serving.passes import RequestPass, RowPlan
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.storage.simulated import SimulatedStorage

Probe = Callable[[AttentionCall, RowPlan, SimulatedStorage], None]
"""Called after every attention call with metered rows, with what is stored as they left it."""


@dataclass(frozen=True)
class BatchPass:
    """What a pass computes, of the B * COLUMNS places that attention is handed.

    requests: those with a token in it. places [N]: where their new tokens stand, request by request. behind: request
    number -> padded places behind its text; they attend to all of it, as they do in transformers, and belong to no
    request.
    """

    requests: Sequence[RequestPass]
    places: Tensor
    behind: dict[int, list[int]] = field(default_factory=dict)

    @property
    def new_slots(self) -> list[Tensor]:
        """The slots of each request's new tokens."""
        return [r.slots[r.slots.numel() - r.new_tokens :] for r in self.requests]


class Passes:
    """The passes of `loaded` under `policy`, over a pool of `num_slots` tokens: an engine of the same runtime as in a
    server, and the `bridge.Engine` that attends for it."""

    def __init__(
        self, engine: str, loaded: LoadedModel, policy: Policy, num_slots: int, probe: Probe | None = None
    ) -> None:
        if policy.quantizer.storage != "simulated":
            raise UnsupportedError(
                f"quantizer.storage is {policy.quantizer.storage!r}; offline the cache is simulated: set 'simulated'"
            )
        if policy.meters_engine:
            raise UnsupportedError(
                "quantizer.name is 'engine', but offline no cache of an engine's own is read back: name a quantizer"
            )
        geometry, *others = geometries = loaded.geometries(num_slots)
        self.pool = TensorPool(geometries)
        self.probe = probe
        self._shape = loaded.shape
        tables = None
        if policy.resolved_quantizer.space == "pre_rope":
            head_dims = {number: layer.head_dim for number, layer in enumerate(loaded.shape.layers)}
            tables = rotary_tables(loaded.model, head_dims, num_slots)
        self.runtime = Runtime(engine, policy, geometry, self.pool, None, tables=tables, others=others)
        self.recorded: list[StoredLayer] | None = None
        """Where a list, `attend` puts there what each layer of a pass of one request writes."""
        self._running: BatchPass | None = None

    def begin(self, batch: BatchPass) -> None:
        """The model is about to compute `batch`."""
        self._running = batch
        if batch.requests:
            written = torch.cat(batch.new_slots)
            same = GroupSlots([request.slots for request in batch.requests], written)  # in the slots of one pool
            self.runtime.begin(batch.requests, written, [same] * (len(self.runtime.groups) - 1))

    def end(self) -> dict[int, str]:
        """Count the pass; of the requests whose gate gave up, by number in the pass, why."""
        batch, self._running = self._running, None
        step = self.runtime.end() if batch is not None and batch.requests else None
        return {} if step is None else step.count(self.runtime.ledger, set(range(len(step.request_ids))))

    def store(self, layer: int, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        """One layer of a pass whose outputs are known, because the same tokens attended the same exact keys before: its
        keys k [N, Hkv, D] and values v [N, Hkv, Dv] are quantized and accounted for, and nothing is computed."""
        batch = self._running
        if batch is None:
            raise UnsupportedError(f"layer {layer} is stored outside a pass that was announced")
        slots, geometry = torch.cat(batch.new_slots), self.runtime.geometry

        def run(new_k: Tensor | None, new_v: Tensor | None) -> Tensor:
            self.pool.write(layer, slots, *((k, v) if new_k is None or new_v is None else (new_k, new_v)))
            return k.new_zeros(0, geometry.num_qo_heads, geometry.v_head_dim)

        q = k.new_zeros(0, geometry.num_qo_heads, geometry.head_dim)
        self.runtime.attend(AttentionCall(layer, q, k, v, slots, torch.arange(len(slots)), spec, run))

    def abandon(self) -> None:
        """The pass failed: nothing of it is counted."""
        self._running = None
        self.runtime.abandon()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """One layer of the pass that is running; see `bridge.Engine`. Places of padding before a text get zeros."""
        batch = self._running
        if batch is None:
            raise UnsupportedError(f"layer {layer} attends outside a pass that was announced")
        self._check(layer, spec, q, k, v)
        if not batch.requests:
            return q.new_zeros(*q.shape[:3], v.shape[-1])
        dtype = self.runtime.geometry.pool_dtype
        queries, (exact_k, exact_v) = q.flatten(0, 1), (x.flatten(0, 1)[batch.places].to(dtype) for x in (k, v))
        slots = torch.cat(batch.new_slots)
        if self.recorded is not None:
            self.recorded.append(StoredLayer(layer, exact_k, exact_v, spec))
        behind: dict[int, Tensor] = {}

        def run(new_k: Tensor | None, new_v: Tensor | None) -> Tensor:
            pair = (exact_k, exact_v) if new_k is None or new_v is None else (new_k, new_v)
            self.pool.write(layer, slots, *pair)
            outputs, first = [], 0
            for number, request in enumerate(batch.requests):
                own = batch.places[first : first + request.new_tokens]
                first += request.new_tokens
                seen = self.pool.read(layer, request.slots)
                outputs.append(causal_attention(queries[own], *seen, spec))
                for place in batch.behind.get(number, ()):
                    behind[place] = causal_attention(queries[place : place + 1], *seen, spec)[0]
            return torch.cat(outputs)

        call = AttentionCall(
            layer=layer,
            q=queries[batch.places],
            exact_k=exact_k,
            exact_v=exact_v,
            slots=slots,
            positions=torch.cat(
                [torch.arange(r.slots.numel() - r.new_tokens, r.slots.numel()) for r in batch.requests]
            ),
            run=run,
            spec=spec,
        )
        made, group = self.runtime.attend(call), self.runtime.groups[self.runtime.group_of[layer]]
        now, storage = group.now, group.cache.storage
        if self.probe is not None and now is not None and now.plan.rows and isinstance(storage, SimulatedStorage):
            self.probe(call, now.plan, storage)
        out = made.new_zeros(len(queries), *made.shape[1:])
        out[batch.places] = made
        for place, output in behind.items():
            out[place] = output
        return out.view(*q.shape[:2], *out.shape[1:])

    def _check(self, layer: int, spec: AttentionSpec, *tensors: Tensor) -> None:
        """UnsupportedError for q, k or v, or a window, that is not what the configuration says of the layer.

        Some models of transformers put a window into their mask and do not hand it to attention, which makes no mask
        here: it would attend to more than the model does.
        """
        own, said = self._shape.layers[layer], f"layer {layer} of {self._shape.name}"
        heads, most = (self._shape.num_qo_heads, own.num_kv_heads, own.num_kv_heads), self.runtime.geometry.num_slots
        shapes = [(count, own.head_dim) for count in heads[:2]] + [(heads[2], own.v_head_dim)]
        found = [tuple(x.shape[2:]) for x in tensors]
        if found != shapes:
            raise UnsupportedError(
                f"{said} attends with q, k and v of {found} (heads, channels), but by its configuration they are "
                f"{shapes}, so its cache is not known; please report the model"
            )
        declared, used = (most if x is None else min(x, most) for x in (own.window, spec.window_left + 1 or None))
        if declared != used:
            windows = [f"the last {x} tokens" if x < most else "all tokens" for x in (used, declared)]
            raise UnsupportedError(
                f"{said} hands on that it attends to {windows[0]}, but by its configuration that is {windows[1]}: it "
                "keeps the window in its mask, which the meter does not follow; please report the model"
            )
