"""Counters tell measured from replayed, also where a graph replays fixed buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError
from witcert_core.kernels.counters import MEASURED, UNKNOWN, advanced, counter_of
from witcert_core.kernels.decode import Workspace, decode_int8
from witcert_core.kernels.host import dispatch
from witcert_core.kernels.host.pages import PageTable

from .int8_case import KEY, LAYER, Int8Case, make_case, queries


class Replay:
    """What a CUDA graph keeps: the launches of one call with all their arguments, run again on whatever tensors hold
    by then. Host code runs only once, as in a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "launch", lambda *args, **options: self.launches.append((args, options)))
            call()

    def run(self) -> None:
        for args, options in self.launches:
            dispatch.launch(*args, **options)


class Static:
    """Inputs and results that keep their addresses from one step to the next."""

    def __init__(self, data: Int8Case) -> None:
        rows = len(data.lengths)
        self.q = queries(data, 1, torch.float32)
        self.cache = data.cache("NHD")
        self.sides = data.k_scales.clone(), data.v_scales.clone()
        self.pass_ids = data.pass_ids.clone()
        self.table = PageTable(data.table.indptr.clone(), torch.zeros(9, dtype=torch.int32), torch.zeros(rows).int())
        self.out = torch.zeros_like(self.q)
        self.acc = torch.zeros(*self.q.shape[:2], 16)
        self.counters = torch.zeros(LAYER + 1, dtype=torch.int64)
        self.flag = torch.ones(1, dtype=torch.int32)
        self.options: dict[str, Any] = dict(
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_kv_len=64,
            flag=self.flag,
            counters=self.counters,
            out=self.out,
            lse=torch.zeros(self.q.shape[:2]),
            acc=self.acc,
            delta_loc=torch.zeros(rows),
            workspace=Workspace.allocate(rows, self.q.shape[1], self.q.shape[2], 64, self.q.device),
        )

    def load(self, data: Int8Case, seed: int) -> None:
        """The next step."""
        self.q.copy_(queries(data, 1, torch.float32, seed=seed))
        new = (*data.cache("NHD"), data.k_scales, data.v_scales, data.pass_ids)
        for mine, theirs in zip((*self.cache, *self.sides, self.pass_ids), new, strict=True):
            mine.copy_(theirs)
        self.table.indptr.copy_(data.table.indptr)
        self.table.indices[: data.table.indices.numel()].copy_(data.table.indices)
        self.table.last_page_len.copy_(data.table.last_page_len)

    def run(self) -> None:
        decode_int8(self.q, self.cache, *self.sides, self.table, self.pass_ids, **self.options)


def test_replays_read_new_inputs_and_advance_the_counter_and_a_skipped_meter_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [make_case((37, 20), 16, 64, 2), make_case((37, 20), 16, 64, 2, seed=3)]
    static = Static(steps[0])
    graph = Replay(monkeypatch, static.run)
    readings, outputs, sums = [static.counters.tolist()], [], []
    for seed, data in enumerate(steps):
        static.load(data, seed)
        graph.run()
        pool = (data.cache("NHD"), data.k_scales, data.v_scales, data.table, data.pass_ids)
        common: dict[str, Any] = {"layer": LAYER, "head_ids": data.head_ids, "key": KEY, "max_kv_len": 64}
        want = decode_int8(static.q, *pool, **common)
        assert torch.equal(static.out, want[0])
        assert torch.equal(static.acc, want[2])
        outputs.append(static.out.clone())
        sums.append(static.acc.clone())
        readings.append(static.counters.tolist())
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(sums[0], sums[1])
    cells = [0] * LAYER + [2 * 2]
    status = [UNKNOWN] * LAYER + [MEASURED]
    assert advanced(readings[0], readings[1], cells) == status == advanced(readings[1], readings[2], cells)

    static.flag.zero_()
    static.q.mul_(2.0)
    graph.run()
    assert not torch.equal(static.out, outputs[1])
    assert torch.equal(static.acc, sums[1])
    assert advanced(readings[2], static.counters, cells) == [UNKNOWN] * (LAYER + 1)


def test_decode_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    static = Static(make_case((20,), 16, 64, 2))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor is read on the host")

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    graph = Replay(monkeypatch, static.run)
    assert len(graph.launches) == 4, "a split pass and a merge, with and without the meter"


def test_only_an_exact_advance_is_measured() -> None:
    assert advanced([5, 5, 5, 5], [9, 8, 10, 9], [4, 4, 4, 0]) == [MEASURED, UNKNOWN, UNKNOWN, UNKNOWN]
    assert advanced([0], torch.tensor([0]), [0]) == [UNKNOWN]
    with pytest.raises(InputError, match="lengths must agree"):
        advanced([0], [0, 1], [1])
    with pytest.raises(InputError, match="layer is 3"):
        counter_of(torch.zeros(3, dtype=torch.int64), 3)
