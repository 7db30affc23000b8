"""Who else attends on a CPU: PyTorch's attention over contiguous keys, vLLM's over pages (in its environment)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cpu.case import PAGE, Call, Case, normal

Maker = Callable[[Case], Call]


def sdpa(dtype: torch.dtype) -> Maker:
    """The query heads of a KV head as rows of one attention, which is faster than ``enable_gqa``."""

    def make(case: Case) -> Call:
        shape = (case.requests, case.kv_heads, case.length, case.head_dim)
        k, v = normal(shape, dtype), normal(shape, dtype)
        q = case.queries(dtype).view(case.batch, case.kv_heads, case.group, case.head_dim)

        def attend(s: int) -> Tensor:
            of = slice(s * case.batch, (s + 1) * case.batch)
            return torch.nn.functional.scaled_dot_product_attention(q, k[of], v[of])

        return attend

    return make


def vllm(kv_cache_dtype: str) -> Maker:
    """vLLM's CPU kernel for bfloat16 queries over a cache of theirs (``auto``) or fp8.

    Raises ImportError where vLLM is not installed.
    """

    def make(case: Case) -> Call:
        ops = importlib.import_module("vllm._custom_ops")
        dtype = torch.bfloat16
        shape = (case.requests * case.pages, case.kv_heads, PAGE, case.head_dim)
        k, v = normal(shape, dtype), normal(shape, dtype)
        if kv_cache_dtype != "auto":
            k, v = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (k, v))
        q, tables = case.queries(dtype), case.page_ids()
        out = torch.empty_like(q)
        lengths = torch.full((case.batch,), case.length, dtype=torch.int32)
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=case.batch,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
            kv_cache_dtype=kv_cache_dtype,
        )

        def attend(s: int) -> None:
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=k,
                value_cache=v,
                output=out,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=case.head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=tables[s],
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
                kv_cache_dtype=kv_cache_dtype,
            )

        return attend

    return make
