"""FlashInfer as an oracle for ``A = sum p~ e^c``: its own decode attention, run twice with a variant that adds radii.

The variant adds ``c`` to each scaled logit, so that ``A = 2^(lse_2 - lse_1)`` with ``lse_1`` from radii 0: another
project's kernel and another way to sum. It stores ``log A`` less precisely than the meter's own ``expm1`` sums, so it
is held against them from outside only.

``python -m bench.flashinfer_oracle compile`` builds the module without a GPU (``CUDA_HOME`` with nvcc, and
``FLASHINFER_CUDA_ARCH_LIST``, e.g. ``9.0a``). ``bench/gpu.sh`` runs it where FlashInfer and a GPU are at hand.
"""

from __future__ import annotations

import ctypes.util
import importlib
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.kernels.host.pages import PageTable

VARIANT = "WitcertRadii"
DECLARATION = """
struct WitcertRadii : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ WitcertRadii(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    uint32_t token = params.radii_indptr[batch_idx] + kv_idx;
    if (kv_idx >= kv_len) return logits;
    return float(logits) * float(params.sm_scale) + params.radii[token * params.num_qo_heads + qo_head_idx];
  });
};
"""


def jit_args(dtype: torch.dtype, head_dim: int) -> list[Any]:
    """What ``BatchDecodeWithPagedKVCacheWrapper(jit_args=...)`` takes."""
    return [
        f"witcert_radii_{str(dtype).removeprefix('torch.')}_{head_dim}",
        dtype,
        dtype,
        dtype,
        torch.int32,
        head_dim,
        head_dim,
        ["radii", "radii_indptr"],
        ["float", "int32_t"],
        ["sm_scale"],
        ["double"],
        VARIANT,
        DECLARATION,
    ]


def compile_module(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Path:
    """Build the variant's module; no GPU is touched. Returns the library.

    Without a driver there is no ``libcuda.so`` to name at the link: an empty one stands in for it.
    """
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    spec = modules.gen_customize_batch_decode_module(*jit_args(dtype, head_dim))
    with tempfile.TemporaryDirectory() as folder:
        if ctypes.util.find_library("cuda") is None:
            stub = ["c++", "-shared", "-x", "c", "/dev/null", "-o", f"{folder}/libcuda.so"]
            subprocess.run(stub, check=True)
            os.environ["LIBRARY_PATH"] = f"{folder}:{os.environ.get('LIBRARY_PATH', '')}"
        spec.build(verbose=True)
    return Path(spec.get_library_path())


def log_a(q: Tensor, cache: tuple[Tensor, Tensor], table: PageTable, radii: Tensor, sm_scale: float) -> Tensor:
    """fp32 ``[B, Hq]`` ``log A`` of one query a request; ``radii`` fp32 ``[tokens, Hq]``, request after request.

    ``cache``: a pair of 16-bit ``[P, page_size, Hkv, D]``.
    """
    flashinfer = importlib.import_module("flashinfer")
    page_size, kv_heads, head_dim = cache[0].shape[1:]
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", jit_args=jit_args(q.dtype, head_dim))
    wrapper.plan(
        table.indptr,
        table.indices,
        table.last_page_len,
        q.shape[1],
        kv_heads,
        head_dim,
        page_size,
        q_data_type=q.dtype,
        kv_data_type=cache[0].dtype,
    )
    lengths = table.lengths(page_size)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=q.device)
    both = []
    for c in (torch.zeros_like(radii), radii):
        both.append(wrapper.run(q, cache, c.contiguous(), starts, sm_scale, return_lse=True)[1])
    moved: Tensor = (both[1] - both[0]) * math.log(2.0)
    return moved


if __name__ == "__main__":
    if sys.argv[1:] != ["compile"]:
        sys.exit("usage: python -m bench.flashinfer_oracle compile")
    print(compile_module())
