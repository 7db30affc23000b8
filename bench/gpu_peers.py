"""16-bit decode kernels to compare with: PyTorch's over contiguous keys, FlashInfer's and SGLang's where installed.

Each maker returns a function of a set number that attends one batch, or raises ImportError.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

PAGE = 16
Attend = Callable[[int], object]


def torch_16bit(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Attend:
    """PyTorch's own attention over contiguous keys: ``k``, ``v [sets * batch * length, Hkv, D]``."""
    keys, values = (x.view(-1, batch, length, *x.shape[1:]).transpose(2, 3) for x in (k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda s: attention(q[:, :, None], keys[s], values[s], enable_gqa=True)


def flashinfer_16bit(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Attend:
    """FlashInfer's paged decode, tensor cores, pages of 16."""
    flashinfer = importlib.import_module("flashinfer")
    heads, dim = q.shape[1:]
    kv_heads, pages = k.shape[1], length // PAGE
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
    cache = tuple(x.view(-1, PAGE, kv_heads, dim) for x in (k, v))
    wrappers = []
    for s in range(k.shape[0] // (batch * length)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * pages
        indices = torch.arange(batch * pages, dtype=torch.int32, device=q.device) + s * batch * pages
        last = torch.full((batch,), PAGE, dtype=torch.int32, device=q.device)
        wrapper.plan(
            indptr,
            indices,
            last,
            heads,
            kv_heads,
            dim,
            PAGE,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        wrappers.append(wrapper)
    return lambda s: wrappers[s].run(q, cache)


def sglang_16bit(q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Attend:
    """SGLang's Triton decode, page size 1."""
    module = importlib.import_module("sglang.kernels.ops.attention.decode_attention")
    heads, dim = q.shape[1:]
    splits = 16
    device = q.device
    logits = torch.empty(batch, heads, splits, dim, device=device)
    lse = torch.empty(batch, heads, splits, device=device)
    used = torch.full((batch,), splits, dtype=torch.int32, device=device)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    out = torch.empty_like(q)
    indices = [
        torch.arange(batch * length, dtype=torch.int64, device=device) + s * batch * length
        for s in range(k.shape[0] // (batch * length))
    ]

    def attend(s: int) -> object:
        module.decode_attention_fwd(
            q, k, v, out, indptr, indices[s], logits, lse, used, splits, 1.0 / math.sqrt(dim), 1.0, 1.0
        )
        return out

    return attend


PEERS = {
    "PyTorch 16-bit": torch_16bit,
    "FlashInfer 16-bit": flashinfer_16bit,
    "SGLang Triton 16-bit": sglang_16bit,
}
