"""The meter in plain torch on one device: no operation mixes its tensors with the host's, and it says the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plugin_serving import MiniEngine, Served
from pretend import DEVICE, Pretended, pretending
from torch import Tensor

from witcert_core.serving.steps import StepCells

POLICIES: dict[str, dict[str, Any]] = {
    "observed": {"name": "int4_token_group"},
    "sketched": {"name": "int4_token_group", "meter": {"stride": 1, "sketch_bits": 4}},
    "dithered": {"name": "int8_dither"},
    "half": {"name": "int8_dither_w", "dtype": torch.bfloat16},
    "certified": {"name": "fp8_e4m3_cast", "gate": {"kind": "certified", "tau": 0.1}},
    "combined": {"name": "int2_token_group", "gate": {"kind": "combined"}, "dtype": torch.bfloat16},
    "evicting": {"name": "int2_token_group", "gate": {"kind": "certified", "copy_bytes": 60000}},
    "groups": {"name": "kivi", "params": {"residual": 32}},
    "calibrated": {"name": "kvquant", "params": {"calibration_tokens": 16, "bits": 3}, "gate": {"kind": "certified"}},
    # Not audited: the outputs of this engine are zeros, which is no attention over what is stored.
    "engine": {"name": "engine", "meter": {"stride": 1, "max_rows": 2}},
    "sampled": {"name": "int4_token_group", "meter": {"stride": 1, "max_rows": 2, "audit_share": 1.0}},
    "sketched sample": {"name": "int4_token_group", "meter": {"stride": 1, "max_rows": 2, "sketch_share": 1.0}},
    "sketched groups": {
        "name": "kivi",
        "params": {"residual": 32},
        "meter": {"stride": 1, "max_rows": 2, "sketch_share": 1.0},
    },
}
PASSES = ({0: 40, 1: 21}, {0: 1, 1: 1}, {0: 9, 1: 1}, {0: 1, 1: 1})


def serve(device: str, **options: Any) -> tuple[MiniEngine, list[StepCells], list[torch.Tensor]]:
    sections = {"meter": {"stride": 1, "audit_every": 1, "max_rows": 2}, **options}
    engine = MiniEngine(device=device, metered=False, **sections)
    requests = [Served(engine, seed) for seed in (1, 2)]
    steps, outputs = [], []
    for new in PASSES:
        step = engine.step({requests[i]: count for i, count in new.items()})
        step.count(engine.runtime.ledger, {0, 1})
        steps.append(step)
        outputs += [out.cpu() for out in engine.outputs]
    first, second = requests
    if options["name"] != "kivi":  # whose groups move whole or not at all
        engine.runtime.overwritten(first.slots[:3].to(device))
        engine.runtime.moved(first.slots[3:5].to(device), second.slots[3:5].to(device))
    steps.append(engine.step({first: 1, second: 1}))
    return engine, steps, outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_on_one_device(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers with the pool elsewhere: prompts, generated tokens, chunks, repairs, what engines move."""
    monkeypatch.setattr("secrets.randbits", lambda _bits: 5)  # the same dither twice
    monkeypatch.setattr("witcert_core.serving.build.without_kernels", lambda *_: "this test")
    reference, expected, outputs = serve("cpu", **POLICIES[policy])
    with pretending():
        engine, steps, found = serve(str(DEVICE), **POLICIES[policy])
    assert isinstance(engine.pool.k, Pretended)
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine.rows == theirs.rows
        assert mine.layers.keys() == theirs.layers.keys()
        for layer, cells in theirs.layers.items():
            for field in ("meter", "out_bound", "floor", "tv_audit"):
                a, b = (getattr(x, field) for x in (mine.layers[layer], cells))
                torch.testing.assert_close(a, b, equal_nan=True)
        assert [v.repaired_blocks for v in mine.verdicts] == [v.repaired_blocks for v in theirs.verdicts]
    for a, b in zip(found, outputs, strict=True):
        torch.testing.assert_close(a, b)
    summaries = [e.runtime.finish("request-1", "stop") for e in (engine, reference)]
    # What the engine of these tests stores is exact, so nothing of its cells is measured.
    counts = [[summary[f"cells_{kind}"] for kind in ("measured", "exact", "unknown")] for summary in summaries]
    assert counts[0] == counts[1]
    assert counts[0][policy == "engine"] > 0
    assert summaries[0]["sample"] == summaries[1]["sample"]
    assert (summaries[0]["sample"] is not None) == (policy in ("sampled", "sketched sample", "sketched groups"))
    assert summaries[0]["gate"] == summaries[1]["gate"]
    repairs = "gate" in POLICIES[policy]
    assert bool(summaries[0]["gate"]["repaired_blocks"]) == repairs


def test_a_mixture_is_refused() -> None:
    with pretending():
        there = torch.zeros(4, 3, device=DEVICE)
        assert there[torch.tensor([1])].tolist() == [[0.0] * 3]  # indices of the host are fine
        assert (there + torch.tensor(2.0)).tolist() == [[2.0] * 3] * 4  # so are numbers
        assert torch.tensor([5], device=DEVICE).tolist() == [5]
        mixtures: tuple[Callable[[], Tensor], ...] = (
            lambda: there.index_select(0, torch.tensor([1])),
            lambda: there + torch.zeros(3),
            lambda: there.masked_fill(torch.zeros(4, 3, dtype=torch.bool), 0.0),
            lambda: torch.zeros(4)[there[:, 0] > 0],
        )
        for mixture in mixtures:
            with pytest.raises(RuntimeError, match="tensors of the host"):
                mixture()
