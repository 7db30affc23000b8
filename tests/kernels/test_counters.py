"""Counters tell measured from replayed, also where a graph replays fixed buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError
from witcert_core.kernels.counters import MEASURED, UNKNOWN, advanced, counter_of
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.launch import decode_int8_op
from witcert_core.kernels.decode.plan import BatchDecodeWithInt8PagedKVCacheWrapper, alibi_slopes

from .int8_case import KEY, LAYER, Int8Case, make_case, queries


class Replay:
    """What a CUDA graph keeps: one call with all its tensors, run again on whatever those hold by then.

    Host code runs only once, as in a capture: the recorded launches are called with the recorded arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
        import witcert_core.kernels.decode as package

        self.launches: list[tuple[Any, ...]] = []
        self.op = decode_int8_op
        with monkeypatch.context() as patch:
            patch.setattr(package, "decode_int8_op", lambda *arguments: self.launches.append(arguments))
            call()

    def run(self) -> None:
        for arguments in self.launches:
            self.op(*arguments)


def pool_of(data: Int8Case, cache: Any) -> tuple[torch.Tensor, ...]:
    return *cache, data.k_scales, data.v_scales, data.pass_ids


def test_replays_read_new_inputs_and_advance_the_counter_and_a_skipped_meter_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_case((37, 20), 16, 64, 2)
    longer = make_case((37, 20), 16, 64, 2, seed=3)
    q = queries(data, 1, torch.float32)
    counters, flag = torch.zeros(LAYER + 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    buffers: dict[str, Any] = dict(
        paged_kv_indptr_buffer=torch.zeros(3, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(9, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(2, dtype=torch.int32),
    )
    wrapper = BatchDecodeWithInt8PagedKVCacheWrapper(data.head_ids, KEY, use_cuda_graph=True, max_kv_len=64, **buffers)
    cache = data.cache("NHD")
    pool = (cache, data.k_scales, data.v_scales, data.pass_ids)

    def plan(lengths: Any) -> None:
        wrapper.plan(
            lengths.indptr,
            lengths.indices,
            lengths.last_page_len,
            2,
            1,
            64,
            16,
            pos_encoding_mode="ALIBI",
            q_data_type=torch.float32,
        )

    def run() -> Any:
        return wrapper.run(q, *pool, layer=LAYER, counters=counters, flag=flag, return_lse=True)

    plan(data.table)
    graph = Replay(monkeypatch, run)
    # What a graph keeps is addresses: nothing it reads may move when the next batch is planned.
    kept = {x.data_ptr() for launch in graph.launches for x in launch if isinstance(x, torch.Tensor)}
    out = wrapper._arguments["out"]
    readings, outputs, sums = [counters.tolist()], [], []
    for step in range(2):
        graph.run()
        want = decode_int8(
            q,
            cache,
            *pool[1:3],
            data.table,
            data.pass_ids,
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_kv_len=64,
            alibi_slopes=alibi_slopes(2),
        )
        assert torch.equal(out, want[0])
        assert torch.equal(wrapper.acc, want[2])
        outputs.append(out.clone())
        sums.append(wrapper.acc.clone())
        readings.append(counters.tolist())
        if step == 0:
            # The next step: other queries and keys in the buffers the graph knows, another page table.
            q.copy_(queries(data, 1, torch.float32, seed=8))
            for mine, theirs in zip(pool_of(data, cache), pool_of(longer, longer.cache("NHD")), strict=True):
                mine.copy_(theirs)
            data.table = longer.table
            plan(longer.table)
            again = Replay(monkeypatch, run)
            assert kept == {x.data_ptr() for launch in again.launches for x in launch if isinstance(x, torch.Tensor)}
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(sums[0], sums[1])
    cells = [0] * LAYER + [2 * 2]
    status = [UNKNOWN] * LAYER + [MEASURED]
    assert advanced(readings[0], readings[1], cells) == status == advanced(readings[1], readings[2], cells)

    with pytest.raises(InputError, match="a captured graph"):
        wrapper.plan(
            data.table.indptr, data.table.indices, data.table.last_page_len, 4, 1, 64, 16, q_data_type=torch.float32
        )
    flag.zero_()
    q.mul_(2.0)
    graph.run()
    assert not torch.equal(out, outputs[1])
    assert torch.equal(wrapper.acc, sums[1])
    assert advanced(readings[2], counters, cells) == [UNKNOWN] * (LAYER + 1)


def test_run_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_case((20,), 16, 64, 2)
    q = queries(data, 1, torch.float32)
    wrapper = BatchDecodeWithInt8PagedKVCacheWrapper(data.head_ids, KEY, max_kv_len=64)
    wrapper.plan(
        data.table.indptr, data.table.indices, data.table.last_page_len, 2, 1, 64, 16, q_data_type=torch.float32
    )

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("run reads a tensor on the host")

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    graph = Replay(
        monkeypatch,
        lambda: wrapper.run(
            q,
            data.cache("NHD"),
            data.k_scales,
            data.v_scales,
            data.pass_ids,
            layer=LAYER,
            counters=torch.zeros(LAYER + 1, dtype=torch.int64),
            flag=torch.ones(1, dtype=torch.int32),
        ),
    )
    assert len(graph.launches) == 2


def test_only_an_exact_advance_is_measured() -> None:
    assert advanced([5, 5, 5, 5], [9, 8, 10, 9], [4, 4, 4, 0]) == [MEASURED, UNKNOWN, UNKNOWN, UNKNOWN]
    assert advanced([0], torch.tensor([0]), [0]) == [UNKNOWN]
    with pytest.raises(InputError, match="lengths must agree"):
        advanced([0], [0, 1], [1])
    with pytest.raises(InputError, match="layer is 3"):
        counter_of(torch.zeros(3, dtype=torch.int64), 3, torch.device("cpu"))
