"""Arguments that operations share, checked: the packed cache, and how queries attend.

Shapes: P pages of ``page_size`` slots, Hkv KV heads, D and Dv channels in Gr = ceil(D / 32) groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from witcert_core.kernels.device.arguments import Bypass, PackedPages, Slots
from witcert_core.kernels.host import checks
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PagedKV, check_int8_cache, check_side
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.kernel_error import KernelArithmetic
from witcert_core.quantizers.dither import DitherKey, num_groups


@dataclass(frozen=True)
class PackedCache:
    """INT8 pages of one layer, with what stands beside them.

    Args:
        k, v: int8 ``[P, page_size, Hkv, D]`` and ``[P, page_size, Hkv, Dv]``.
        k_scales, v_scales: fp16 ``[P, page_size, Hkv, Gr]``.
        pass_ids: int32 bits ``[slots]`` of the pass that wrote each slot, 0 for never written.
        head_ids: int32 ``[Hkv]``.
        witness: uint8 ``[P, page_size, Hkv, Gr]``.
        bypass: K channels kept in 16 bit.
        laid_out: what a backend made of all this, by what else it took.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
    pass_ids: Tensor
    head_ids: Tensor
    witness: Tensor | None
    bypass: BypassedKeys | None
    laid_out: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def checked(
        cls,
        codes: PagedKV,
        k_scales: Tensor,
        v_scales: Tensor,
        pass_ids: Tensor,
        head_ids: Tensor,
        witness: Tensor | None,
        bypass: BypassedKeys | None,
        dtype: torch.dtype,
    ) -> PackedCache:
        """For keys or queries of ``dtype``; scales ``[PAGES, PAGE, Hkv, Gr]``, ``head_ids [Hkv]``.

        Raises:
            InputError: shapes, strides or dtypes that do not fit together.
        """
        k, v = codes
        check_int8_cache(k, v, k_scales, v_scales)
        checks.check_vector("head_ids", head_ids, k.shape[2], torch.int32)
        if witness is not None:
            check_side("witness", witness, k, num_groups(k.shape[3]), torch.uint8)
        if bypass is not None:
            bypass.check(k, dtype)
        ids = checks.pass_bits(pass_ids, k.shape[0] * k.shape[1])
        return cls(k, v, k_scales, v_scales, ids, head_ids, witness, bypass)

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def bypassed(self) -> int:
        """Bypassed channels of a head."""
        return 0 if self.bypass is None else int(self.bypass.channels.shape[1])

    def pages(self) -> PackedPages:
        """As the writer takes it, scales and witness as they are stored."""
        bypass = None if self.bypass is None else Bypass(self.bypass.keep, self.bypass.channels, self.bypass.k)
        return PackedPages(
            Slots.of(self.k),
            Slots.of(self.v),
            self.k_scales,
            self.v_scales,
            self.witness,
            self.pass_ids,
            self.head_ids,
            bypass,
        )

    def words(self) -> PackedPages:
        """As attention takes it: scales of K two to a word, the witness four to a word, where their number allows."""
        witness = self.witness
        if witness is not None and witness.shape[-1] % 4 == 0:
            witness = witness.view(torch.int32)
        return self.pages()._replace(k_scales=scale_words(self.k_scales), witness=witness)


def scale_words(scales: Tensor) -> Tensor:
    """fp16 scales ``[..., Gr]`` as the device's ``load_scales`` reads them: words of two where their number is even."""
    return scales.view(torch.int32) if scales.shape[-1] % 2 == 0 else scales


def attention_spec(
    q: Tensor,
    sm_scale: float | None,
    logits_soft_cap: float,
    window_left: int,
    sinks: Tensor | None,
    arithmetic: KernelArithmetic | None = None,
) -> AttentionSpec:
    """How queries ``q [T, Hq, D]`` attend; ``sm_scale`` is ``1 / sqrt(D)`` by default, ``sinks [Hq]`` become fp32."""
    scale = checks.softmax_scale(sm_scale, q.shape[2])
    return AttentionSpec(
        scale, logits_soft_cap, window_left, checks.kernel_float(sinks, "sinks", q.shape[1]), arithmetic
    )


def cap_of(spec: AttentionSpec) -> float | None:
    """The soft cap as kernels take it, None for none."""
    return spec.logits_soft_cap if spec.logits_soft_cap > 0.0 else None


def window_of(spec: AttentionSpec) -> int | None:
    """The window as kernels take it, None for none."""
    return spec.window_left if spec.window_left >= 0 else None


@dataclass(frozen=True)
class DitherOf:
    """Whose dither the codes have: the Philox key and the layer in the whole model."""

    key: DitherKey
    layer: int
