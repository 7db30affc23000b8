"""The plan/run wrapper: FlashInfer's names, buffers that keep their addresses, refusals on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.kernels.decode import decode_int8
from witcert_core.kernels.decode.plan import BatchDecodeWithInt8PagedKVCacheWrapper, alibi_slopes

from .int8_case import KEY, LAYER, make_case, queries


def test_replay_in_kept_buffers_equals_a_fresh_call() -> None:
    data = make_case((20, 70), 16, 64, 2)
    q = queries(data, 1, torch.float32)
    buffers: dict[str, Any] = dict(
        paged_kv_indptr_buffer=torch.zeros(3, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(50, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(2, dtype=torch.int32),
    )
    wrapper = BatchDecodeWithInt8PagedKVCacheWrapper(data.head_ids, KEY, use_cuda_graph=True, max_kv_len=600, **buffers)
    shape: dict[str, Any] = dict(num_qo_heads=2, num_kv_heads=1, head_dim=64, page_size=16, q_data_type=torch.float32)
    pool = (data.cache("NHD"), data.k_scales, data.v_scales)
    for table in (data.table, data.table):
        wrapper.plan(table.indptr, table.indices, table.last_page_len, pos_encoding_mode="ALIBI", **shape)
        out, lse = wrapper.run(q, *pool, data.pass_ids, layer=LAYER, return_lse=True)
        want = decode_int8(
            q,
            *pool,
            table,
            data.pass_ids,
            layer=LAYER,
            head_ids=data.head_ids,
            key=KEY,
            max_kv_len=70,
            alibi_slopes=alibi_slopes(2),
        )
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
        assert torch.equal(wrapper.acc, want[2])
    assert torch.equal(buffers["paged_kv_indptr_buffer"], data.table.indptr)


def test_refusals() -> None:
    data = make_case((20,), 16, 64, 2)
    table = (data.table.indptr, data.table.indices, data.table.last_page_len)
    with pytest.raises(InputError, match="paged_kv_"):
        BatchDecodeWithInt8PagedKVCacheWrapper(data.head_ids, KEY, use_cuda_graph=True)
    wrapper = BatchDecodeWithInt8PagedKVCacheWrapper(data.head_ids, KEY, max_kv_len=10)
    with pytest.raises(InputError, match="run before plan"):
        wrapper.run(torch.zeros(1, 2, 64), data.cache("NHD"), data.k_scales, data.v_scales, data.pass_ids, layer=0)
    with pytest.raises(InputError, match="20 tokens; max_kv_len is 10"):
        wrapper.plan(*table, 2, 1, 64, 16)
    with pytest.raises(UnsupportedError, match="ROPE_LLAMA"):
        wrapper.plan(*table, 2, 1, 64, 16, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(InputError, match="num_kv_heads=2"):
        wrapper.plan(*table, 2, 2, 64, 16)


def test_alibi_slopes_of_eight_and_of_twelve_heads() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])
