"""What of a packed cache is exact: repaired pages and bypassed channels, as attention calls take them."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.repair.pages import RepairedPages


def check_exact(
    repaired: RepairedPages | None,
    bypass: BypassedKeys | None,
    k: Tensor,
    v_dim: int,
    dtype: torch.dtype,
    k_scale: float,
    v_scale: float,
) -> None:
    """Raise unless both fit the codes ``k [P, page_size, Hkv, D]`` and queries of ``dtype``."""
    pages, page_size, kv_heads, head_dim = k.shape
    if repaired is not None:
        repaired.check(pages, page_size, kv_heads, head_dim, v_dim, dtype)
        if k_scale != 1.0 or v_scale != 1.0:
            raise InputError(f"k_scale={k_scale} and v_scale={v_scale} must be 1 beside repaired pages")
    if bypass is not None:
        bypass.check(k, dtype)


def exact_tensors(repaired: RepairedPages | None, bypass: BypassedKeys | None) -> tuple[Tensor | None, ...]:
    """Their six tensors in the order the custom ops take them, or none."""
    pages = (None, None, None) if repaired is None else (repaired.index, repaired.k, repaired.v)
    return *pages, *((None, None, None) if bypass is None else (bypass.keep, bypass.channels, bypass.k))
