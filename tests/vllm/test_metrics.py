"""What the scheduler counts and sends is what the API server shows."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import Tensor
from witcert_vllm.metrics import Recorder, replay

from witcert_core.report.counts import RequestState
from witcert_core.report.prometheus import Metrics
from witcert_core.report.sample import BoundedBySketches, Compared

pytestmark = pytest.mark.vllm


def pair(first: float, second: float) -> Tensor:
    return torch.tensor([first, second], dtype=torch.float64)


def calls() -> dict[str, list[object]]:
    """Arguments for every counting method of `Metrics`."""
    names = [name for name, _ in inspect.getmembers(Metrics, inspect.isfunction) if not name.startswith("_")]
    seen = inspect.signature(RequestState.observe).return_annotation
    assert "Observed" in str(seen)
    from witcert_core.report import counts

    values = {"meter": torch.tensor([0.1, 0.5], dtype=torch.float64)}
    fields = counts.Observed.__dataclass_fields__
    given: dict[str, Any] = {
        name: values.get(name, True if f.type in ("bool", bool) else 1) for name, f in fields.items()
    }
    known: dict[str, list[object]] = {
        "announce": ["q"],
        "cells_measured": ["q", counts.Observed(**given)],
        "cells_compared": ["q", Compared(pair(0.0, 0.2), pair(0.1, torch.inf), pair(1.5, 9), pair(2, 3), 1)],
        "rows_not_audited": [2, "no room"],
        "cells_sketched": ["q", BoundedBySketches(pair(0.0, 0.2), pair(0.1, 1.5), pair(1.5, 9), 1)],
        "rows_not_sketched": [2, "no room"],
        "rows_unknown": [3],
        "row_rejected": ["q", 1],
        "row_probed": [True, 0.5],
        "cells_unknown": ["q", 4],
        "request_finished": ["q", 0.5],
    }
    assert sorted(known) == sorted(names)
    return known


def test_a_recorded_count_is_the_count() -> None:
    direct, relayed = CollectorRegistry(), CollectorRegistry()
    metrics, recorder = Metrics(direct), Recorder()
    for name, arguments in calls().items():
        getattr(metrics, name)(*arguments)
        getattr(recorder, name)(*arguments)
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.take()))  # as between vLLM's processes
    replay(Metrics(relayed), events)

    def shown(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert shown(relayed) == shown(direct)
    assert recorder.take() == []
