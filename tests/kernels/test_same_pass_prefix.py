"""An engine may hand out a prefix in the very pass that computes it: what is then read, and what bounds speak of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audits import audit_of
from layer_pool import LayerPool
from torch import Tensor

from witcert_core.cache.packed import PackedLayer
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.tv import total_variation
from witcert_core.policy.model import parse_policy
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.calls import AttentionCall
from witcert_core.serving.device.waves import waves
from witcert_core.serving.geometry import Geometry
from witcert_core.serving.passes import RequestPass, RowPlan
from witcert_core.serving.runtime import Runtime
from witcert_core.serving.steps import StepCells

from .two_requests import built_for

pytestmark = pytest.mark.usefixtures("kernels")

D, SLOTS, SCALE = 32, 60, 32**-0.5
FIRST = torch.arange(1, 17)  # slots that hold another text's keys when the pass begins
SECOND, THIRD, FOURTH = torch.arange(20, 23), torch.arange(30, 32), torch.arange(40, 41)


class Served:
    """A layer of one head whose exact keys and values are at hand."""

    def __init__(self, storage: str, who: str) -> None:
        torch.manual_seed(0)
        packed, name = storage == "packed", "engine" if storage == "engine" else "int8_dither"
        settings = {"name": name, "storage": "packed" if packed else "simulated"}
        meter = {"stride": 1, "audit_every": 1, "max_rows": 9}
        policy = parse_policy({"version": 1, "quantizer": settings, "meter": meter, "prefill_reads": "chunk_exact"})
        geometry = Geometry("test", 1, (0,), 1, 1, (0,), D, D, SLOTS, torch.float32, RotarySpec(D), "cpu")
        self.pool = LayerPool(torch.zeros(SLOTS, 1, D), torch.zeros(SLOTS, 1, D))

        def side(width: int, value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((SLOTS, 1, width), value, dtype=dtype)

        scales = [side(1, float("inf"), torch.float16) for _ in "kv"]
        layer = PackedLayer(side(D, 0, torch.int8), side(D, 0, torch.int8), *scales)
        store: Any = {0: layer} if packed else self.pool
        with built_for(who):
            self.runtime = Runtime("test", policy, geometry, store, None)
        self.exact = {x: torch.zeros(SLOTS, D, dtype=torch.float64) for x in "kv"}

    def step(self, *requests: tuple[str, Tensor, int]) -> tuple[StepCells, Tensor, Tensor]:
        """One pass over chunks (id, slots, new tokens) that read themselves exactly; its cells, queries and outputs."""
        passes = [RequestPass(rid, slots, new, True, attends_quantized=False) for rid, slots, new in requests]
        slots = torch.cat([p.slots[-p.new_tokens :] for p in passes])
        positions = torch.cat([torch.arange(p.slots.numel() - p.new_tokens, p.slots.numel()) for p in passes])
        q, k, v = (torch.randn(slots.numel(), 1, D) * scale for scale in (2, 2, 1))
        self.exact["k"][slots], self.exact["v"][slots] = k[:, 0].double(), v[:, 0].double()
        self.runtime.begin(passes, slots)

        def run(own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
            self.pool.write(0, slots, k if own_k is None else own_k, v if own_v is None else own_v)
            rows = [p.slots[: p.slots.numel() - left] for p in passes for left in reversed(range(p.new_tokens))]
            outs = []
            for mine, seen in zip(q[:, 0], rows, strict=True):
                keys, values = (x[:, 0] for x in self.pool.read(0, seen))
                outs.append((mine @ keys.T * SCALE).softmax(-1) @ values)
            return torch.stack(outs)

        call = AttentionCall(0, q, k, v, slots, positions, AttentionSpec(SCALE), run)
        out = self.runtime.attend(call).view(-1, D)
        step = self.runtime.end()
        assert step is not None
        return step, q[:, 0].double(), out.double()

    def truth(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[float, Tensor, Tensor]:
        """TV, output error and exact output of a query over what it read of the tokens in `seen`."""
        exact = (q @ self.exact["k"][seen].T * SCALE).softmax(-1)
        served = (q @ keys.T * SCALE).softmax(-1)
        o = exact @ self.exact["v"][seen]
        return float(total_variation(exact[None], served[None])), o, served @ values


@pytest.mark.parametrize(
    ("storage", "who"),
    [("packed", "kernels"), ("packed", "torch"), ("simulated", "kernels"), ("simulated", "torch"), ("engine", "torch")],
)
def test_a_prefix_of_the_same_pass_is_never_read_as_what_its_slots_held_before(storage: str, who: str) -> None:
    """Requests in a chain, each reading what the one before computes; handed over in an order that does not help."""
    served = Served(storage, who)
    served.step(("old", FIRST, 16))
    served.runtime.forget("old")
    both = torch.cat([FIRST, SECOND])
    order = [("c", torch.cat([both, THIRD]), 2), ("b", both, 3), ("a", FIRST, 16), ("d", torch.cat([FIRST, FOURTH]), 1)]
    step, q, out = served.step(*order)
    cells = step.layers[0]
    assert len(step.rows) == 6  # those of a read nothing quantized
    for number, row in enumerate(step.rows):
        seen = order[row.request][1][: row.position + 1]
        own_from = order[row.request][1].numel() - order[row.request][2]
        keys, values = served.exact["k"][seen].clone(), served.exact["v"][seen].clone()
        if (storage, who) == ("packed", "kernels"):  # reads codes of the tokens before its own
            stored = served.runtime.groups[0].cache.storage.stored(0, seen[:own_from])
            keys[:own_from], values[:own_from] = (x[:, 0].double() for x in stored)
        tv, exact, expected = served.truth(q[row.token], keys, values, seen)
        assert torch.allclose(out[row.token], expected, atol=2e-5)
        assert tv <= cells.meter[number, 0]
        assert (out[row.token] - exact).norm() <= cells.out_bound[number, 0] + 2e-6  # fp32 sums over values
        assert torch.allclose(audit_of(cells)[number, 0], torch.tensor(tv).double(), atol=1e-5)
        if storage == "engine":  # whether it reads others' tokens before or after they are written is not known
            assert cells.meter[number, 0] == 1
            assert cells.out_bound[number, 0].isinf()
        else:
            assert cells.meter[number, 0] < 0.5


def test_requests_attend_after_those_they_read_from() -> None:
    def plan(*requests: tuple[list[int], int]) -> RowPlan:
        return RowPlan([], [torch.tensor(slots, dtype=torch.int64) for slots, _ in requests], [n for _, n in requests])

    chain = plan(([1, 2, 3, 4], 1), ([1, 2, 3], 1), ([1, 2], 2), ([7, 8], 1))
    assert waves(chain, [False] * 4) == [[2, 3], [1], [0]]
    assert waves(chain, [True, False, True, False]) == [[1, 2, 3], [0]]
    assert waves(chain, [True] * 4) == [[0, 1, 2, 3]]
    assert waves(plan(([1, 2], 2), ([3], 1)), [False, False]) == [[0, 1]]
