"""The witness writer: K and V are one launch each."""

from __future__ import annotations

from torch import Tensor

from witcert_core.kernels.device.arguments import power_of_two
from witcert_core.kernels.host import dispatch

TOKENS = 16


def launch_record(
    exact: Tensor, stored: Tensor, side: Tensor, slot_mapping: Tensor, channel_band: Tensor | None, num_bands: int
) -> None:
    """Norms of ``exact - stored [T, Hkv, D]`` into ``side [SLOTS, Hkv, B]``: of each band of ``channel_band``, or of
    all channels at once without one."""
    from witcert_core.kernels.witness.triton import record_witness_kernel

    tokens, heads, dim = exact.shape
    dispatch.launch(
        record_witness_kernel,
        (-(-tokens // TOKENS), heads),
        exact,
        stored,
        side,
        slot_mapping,
        channel_band,
        tokens,
        num_bands,
        HKV=heads,
        D=dim,
        DP=power_of_two(dim),
        N=TOKENS,
        num_warps=4,
    )
