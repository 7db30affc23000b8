"""What kernels take, in named tuples: pointers with their strides, and what a kernel is compiled for.

A member that is absent is None; kernels ask for it when they are compiled. Tensors on the host, pointers on the device.

Shapes: T tokens or query rows, H heads, Hkv KV heads, D and Dv channels, P pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from witcert_core.quantizers.dither import num_groups


class Heads(NamedTuple):
    """``[T, H, D]`` with adjacent channels, and the strides of its rows and heads."""

    ptr: Any
    row: Any
    head: Any

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        return cls(x, x.stride(0), x.stride(1))


class Slots(NamedTuple):
    """``[P, page_size, Hkv, D]`` with adjacent channels, and the strides of its pages, tokens and heads."""

    ptr: Any
    page: Any
    token: Any
    head: Any

    @classmethod
    def of(cls, x: Tensor) -> Slots:
        return cls(x, x.stride(0), x.stride(1), x.stride(2))


class Pages(NamedTuple):
    """A page table: int32 ``indptr [B + 1]``, ``indices``, ``last_page_len [B]``."""

    indptr: Any
    indices: Any
    last_page_len: Any


class Rows(NamedTuple):
    """int32 ``[R]`` each: rows that come one by one, with their request, position and number of paged tokens."""

    request: Any
    position: Any
    limit: Any


class Tail(NamedTuple):
    """int32 ``[R]`` each: row of the output, and tokens the row sees after its pages."""

    target: Any
    length: Any


class Bypass(NamedTuple):
    """Channels kept in 16 bit: ``keep [Hkv, D]`` is 0 at them, ``channels [Hkv, 2 m]`` lists them, ``k`` their keys."""

    keep: Any
    channels: Any
    k: Any


class PackedPages(NamedTuple):
    """INT8 pages with what stands beside them; ``k_scales`` and ``witness`` in the words that kernels load."""

    k: Slots
    v: Slots
    k_scales: Any
    v_scales: Any
    witness: Any
    pass_ids: Any
    head_ids: Any
    bypass: Bypass | None


class Shape(NamedTuple):
    """What an attention kernel is compiled for.

    ``G`` query heads of a KV head; ``D``, ``DV`` channels of K and V in ``NG``, ``NV`` groups of 32, and ``GV`` the
    latter rounded up to a power of two; ``PAGE`` tokens of a page; tiles of ``M`` (query row, head) pairs and ``N``
    tokens; ``P_DTYPE``, in which weights meet V; ``BYPASS`` channels of a head kept in 16 bit, ``BP`` in a tile;
    ``DIGITS``: queries meet codes as two bytes a channel.
    """

    G: int
    D: int
    DV: int
    NG: int
    NV: int
    GV: int
    PAGE: int
    M: int
    N: int
    P_DTYPE: Any
    BYPASS: int
    BP: int
    DIGITS: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        *,
        page_size: int,
        pairs: int,
        tokens: int,
        weights: Any,
        bypass: int = 0,
        digits: bool = False,
    ) -> Shape:
        """Of queries ``q [T, H, D]`` over values ``v [.., Hkv, Dv]``."""
        v_dim, groups = v.shape[-1], num_groups(v.shape[-1])
        return cls(
            G=q.shape[1] // v.shape[-2],
            D=q.shape[2],
            DV=v_dim,
            NG=num_groups(q.shape[2]),
            NV=groups,
            GV=power_of_two(groups),
            PAGE=page_size,
            M=pairs,
            N=tokens,
            P_DTYPE=weights,
            BYPASS=bypass,
            BP=max(16, power_of_two(bypass)),
            DIGITS=digits,
        )


def power_of_two(n: int) -> int:
    """The least that is at least ``n``, as tiles need them."""
    return 1 << max(n - 1, 0).bit_length()
