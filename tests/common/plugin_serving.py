"""The serving runtime of the core over a pool of plain tensors: requests, passes and attention without an engine.

Keys and values are drawn per request and position, as if from a model; every one is remembered, so what is stored and
reported can be compared with the truth.
"""

from __future__ import annotations

from typing import Any

import torch
from layer_pool import attention
from rotation import inv_freq
from torch import Tensor

from witcert_core.meter.attention import AttentionSpec
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.dither import DitherKey
from witcert_core.quantizers.rotary import RotarySpec, RotaryTable
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.sampled import SampledCopies
from witcert_core.serving.sketched import SampledSketches
from witcert_core.serving.steps import StepCells

HQ, HKV, D, LAYERS, SLOTS = 4, 2, 64, 2, 400
SCALE = D**-0.5
SPEC = RotarySpec(D)


def rotary_table(
    mscale: float = 1.0, spec: RotarySpec = SPEC, positions: int = 512, device: str = "cpu"
) -> RotaryTable:
    angles = torch.arange(positions)[:, None] * inv_freq(spec)[None]
    return RotaryTable(spec, (torch.cat([angles.cos(), angles.sin()], -1) * mscale).float().to(device))


class TensorPool:
    """`witcert_core.cache.protocols.Pool` over [LAYERS, SLOTS, HKV, D] tensors."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.k = torch.full((LAYERS, SLOTS, HKV, D), float("nan"), dtype=dtype, device=device)
        self.v = self.k.clone()

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.k[layer, slots], self.v[layer, slots]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[layer, slots], self.v[layer, slots] = k, v

    def restore(self, layer: int, slots: Tensor, head: int, k: Tensor, v: Tensor) -> None:
        self.k[layer, slots, head], self.v[layer, slots, head] = k.to(self.k), v.to(self.v)


class Served:
    """One request: its tokens' slots, and the keys and values a model would hand over, [LAYERS, 200, HKV, D]."""

    def __init__(self, engine: MiniEngine, seed: int, prefix_of: Served | None = None, shared: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name = f"request-{seed}"
        self.slots = engine.take(200)
        self.exact = {kind: torch.randn(LAYERS, 200, HKV, D, generator=generator) * 2 for kind in "kv"}
        for kind in "kv":  # as models have them: a few channels far off, a head of small values
            self.exact[kind][..., 0, 5] += 12.0
            self.exact[kind][..., 1, :] *= 0.1
            self.exact[kind] = self.exact[kind].to(engine.dtype)
        if prefix_of is not None:
            self.slots[:shared] = prefix_of.slots[:shared]
            for kind in "kv":
                self.exact[kind][:, :shared] = prefix_of.exact[kind][:, :shared]
        self.length = shared


class MiniEngine:
    """A runtime with its cache, driven pass by pass; with `metered` every decode row is bounded and compared.

    device: where the pool lies and what attention is handed; only the CPU's can be compared. asked, outputs: of the
    last pass, a layer each [N, HQ, D]: queries; 0, or what a gate computed again.
    """

    def __init__(
        self, name: str, params: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **sections: Any
    ) -> None:
        tables = sections.pop("tables", lambda _layer: rotary_table(device=self.device))
        self.metered = sections.pop("metered", False)
        self.device: str = sections.pop("device", "cpu")
        self.outputs: list[Tensor] = []
        self.asked: list[Tensor] = []
        meter = {"stride": 1, "audit_every": 1, "max_rows": 2} if self.metered else {}
        quantizer = {"name": name, "params": params or {}}
        policy = parse_policy({"version": 1, "quantizer": quantizer, "meter": meter, **sections})
        self.dtype: torch.dtype = dtype
        self.pool = TensorPool(dtype, self.device)
        self.free = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))
        self.queries = torch.Generator().manual_seed(4)
        geometry = Geometry(
            backend="test",
            total_qo_heads=HQ,
            layers=tuple(range(LAYERS)),
            num_qo_heads=HQ,
            num_kv_heads=HKV,
            kv_head_ids=tuple(range(HKV)),
            head_dim=D,
            v_head_dim=D,
            num_slots=SLOTS,
            pool_dtype=dtype,
            rotary=SPEC,
            device=self.device,
        )

        self.runtime = Runtime("test", policy, geometry, self.pool, None, tables=tables)

    def take(self, count: int) -> Tensor:
        """The next `count` free slots; they come round again, as a pool's do."""
        taken, self.free = self.free[:count].clone(), self.free.roll(-count)
        return taken

    def step(self, new: dict[Served, int]) -> StepCells:
        """One pass: new tokens for each request. Bounds are compared with the truth on the way."""
        passes, out_slots, places = [], [], []
        for request, count in new.items():
            first, request.length = request.length, request.length + count
            passes.append(RequestPass(request.name, request.slots[: request.length].to(self.device), count))
            out_slots.append(request.slots[first : request.length])
            places.append(torch.arange(first, request.length))
        slots, positions = torch.cat(out_slots).to(self.device), torch.cat(places).to(self.device)
        self.runtime.begin(passes, slots)
        decoding = [count == 1 < request.length for request, count in new.items()]
        self.asked, self.outputs = [], []
        for layer in range(LAYERS):
            own = [torch.cat([r.exact[kind][layer, p] for r, p in zip(new, places, strict=True)]) for kind in "kv"]
            own = [x.to(self.device) for x in own]
            q = (torch.randn(len(slots), HQ, D, generator=self.queries) * 2).to(self.device, self.dtype)
            self.asked.append(q)

            def run(k: Tensor | None, v: Tensor | None, layer: int = layer, own: list[Tensor] = own) -> Tensor:
                self.pool.write(layer, slots, own[0] if k is None else k, own[1] if v is None else v)
                return torch.zeros(len(slots), HQ, D, device=self.device)

            call = AttentionCall(layer, q, own[0], own[1], slots, positions, AttentionSpec(SCALE), run)
            self.outputs.append(self.runtime.attend(call))
        step = self.runtime.end()
        assert step is not None
        if self.metered:
            self.compare(step, list(new), decoding, self.asked)
        return step

    def compare(self, step: StepCells, requests: list[Served], decoding: list[bool], asked: list[Tensor]) -> None:
        """Every metered decode row: true TV and true output error against what was reported."""
        for layer, cells in step.layers.items():
            for number, row in enumerate(step.rows):
                if not decoding[row.request]:
                    continue
                request, q = requests[row.request], asked[layer][row.token]
                out, weights = attention(q, *self.stored(request, layer))
                exact = [request.exact[kind][layer, : request.length] for kind in "kv"]
                exact_out, exact_weights = attention(q, exact[0], exact[1])
                assert ((weights - exact_weights).abs().sum(-1) / 2 <= cells.meter[number]).all()
                assert ((exact_out - out).norm(dim=-1) <= cells.out_bound[number]).all()

    def stored(self, request: Served, layer: int = 1) -> tuple[Tensor, Tensor]:
        return self.pool.read(layer, request.slots[: request.length])

    def changed(self, request: Served, layer: int = 1) -> list[int]:
        """Positions whose stored keys or values are not the exact ones."""
        k, v = self.stored(request, layer)
        exact_k, exact_v = (request.exact[kind][layer, : request.length] for kind in "kv")
        return ((k != exact_k).flatten(1).any(1) | (v != exact_v).flatten(1).any(1)).nonzero().flatten().tolist()


def sampling_engine(name: str, meter: dict[str, Any], **sections: Any) -> MiniEngine:
    """Four rows of a chunk are metered; every engine made so draws the same dither."""
    params = sections.pop("params", {})
    made = MiniEngine(name, params, meter={"stride": 1, "max_rows": 4, **meter}, **sections)
    made.runtime.groups[0].encoder.dither_key = DitherKey(0, 5, 0)
    return made


def play(made: MiniEngine) -> tuple[list[StepCells], list[dict[str, Any]]]:
    """Two requests, chunks and generated tokens; every step, and the summaries."""
    a, b = Served(made, 1), Served(made, 2)
    steps = []
    for new in ({a: 37, b: 20}, {a: 3, b: 1}, {a: 1, b: 30}, {a: 1, b: 1}):
        step = made.step(new)
        step.count(made.runtime.ledger, {0, 1})
        steps.append(step)
    return steps, [made.runtime.finish(request.name, "stop") for request in (a, b)]


def sampled_of(runtime: Runtime) -> SampledCopies:
    """The exact copies of a share of the requests, which this runtime was asked for."""
    assert runtime.sampled is not None
    return runtime.sampled


def sketched_of(runtime: Runtime) -> SampledSketches:
    """The sketches of a share of the requests, which this runtime was asked for."""
    assert runtime.sketched is not None
    return runtime.sketched
