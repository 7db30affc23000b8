"""Decode attention over INT8 pages in float64, and the accumulators the kernel must not fall below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.radii import radius_dither, radius_group_witness
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.pages import PageTable, gather
from witcert_core.kernels.repair.pages import RepairedPages
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, accumulate
from witcert_core.meter.tv import attention_logits
from witcert_core.quantizers.dither import DitherKey, rows


def dequantize(codes: Tensor, scales: Tensor, u: Tensor | float = 0.0) -> Tensor:
    """``s (code - u)`` (K dithered, V with ``u = 0``) in float64 ``[S, Hkv, D]``, unrounded; 0 where the
    scale is not finite."""
    s = scales.to(torch.float64)
    s = torch.where(s.isfinite() & (s >= 0), s, 0.0).repeat_interleave(32, dim=-1)[..., : codes.shape[-1]]
    return s * (codes.to(torch.float64) - torch.as_tensor(u, dtype=torch.float64))


def lost_share(q: Tensor) -> Tensor:
    """Largest share of any group's ``||q_g||_1`` that the kernel's two bytes a channel lose, float64 ``[H, 1]``.

    As :func:`witcert_core.kernels.device.digits.query_digits` splits queries ``q [H, D]`` of 16 bit.
    """
    padded = torch.nn.functional.pad(q.to(torch.float64), (0, -q.shape[-1] % 32))
    x = padded.reshape(q.shape[0], -1, 32)
    largest = x.abs().amax(dim=-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 15 + (mantissa * 2.0**15 >= 32639.5).to(torch.int32)
    steps = x / torch.exp2(exponent.clamp(min=30 - 127).to(torch.float64))
    whole = steps.round()
    norm = steps.abs().sum(dim=-1)
    share: Tensor = ((steps - whole).abs().sum(dim=-1) / torch.where(norm > 0, norm, 1.0)).amax(dim=-1, keepdim=True)
    return share


def value_radius(scales: Tensor, channels: int) -> Tensor:
    """``(1 + 2^-13) sqrt(sum_g n_g s_g^2) / 2``, float64 ``[S, Hkv]``; infinite where a scale is not
    finite."""
    s = scales.to(torch.float64)
    sizes = torch.full((s.shape[-1],), 32.0, dtype=torch.float64)
    sizes[-1] = channels - 32 * (s.shape[-1] - 1)
    rho = (sizes * s.square()).sum(dim=-1).sqrt() * (0.5 * (1.0 + 2.0**-13))
    return torch.where((s.isfinite() & (s >= 0)).all(dim=-1), rho, float("inf"))


@dataclass(frozen=True)
class PackedTokens:
    """S tokens of a packed cache in float64, and what their radii need.

    k ``[S, Hkv, D]``, v ``[S, Hkv, Dv]`` as read, without ``k_scale`` and ``v_scale``; steps ``[S, Hkv, Gr]``, 0 where
    repaired; ``witness`` as stored; ``never`` written and ``exact`` (repaired) ``[S, Hkv]``; ``spared [S, Hkv, 2 m]``.
    """

    k: Tensor
    v: Tensor
    k_steps: Tensor
    v_steps: Tensor
    witness: Tensor | None
    never: Tensor
    exact: Tensor
    bypass: BypassedKeys | None
    spared: Tensor | None

    def key_radius(
        self,
        q: Tensor,
        sm_scale: float,
        delta_loc: float,
        num_visible: int,
        logits_soft_cap: float,
        bias: Tensor | float,
        digits: bool,
    ) -> Tensor:
        """``c [H, S]`` of ``q [H, D]``: quantization radius plus the arithmetic of the kernel (``common/slack.py``),
        which takes queries as ``digits`` (:func:`lost_share`) or in fp32."""
        packed_q = q if self.bypass is None else self.bypass.spare(q)
        s = torch.where(self.k_steps >= 0, self.k_steps, float("inf"))
        s = torch.where(self.never[:, :, None], float("inf"), s.to(torch.float64))
        c = radius_dither(packed_q, s, sm_scale, delta_loc, num_visible)
        if self.witness is not None:
            c = torch.minimum(c, radius_group_witness(packed_q, s, self.witness, sm_scale))
        half_steps = radius_dither(packed_q, s, sm_scale, 0.0, num_visible)
        lost = lost_share(packed_q) if digits else 0.0
        c = c + half_steps * (2.0 * slack.MAX_CODE * (slack.int8_dot_error(s.shape[-1]) + lost))
        length = packed_q.norm(dim=-1) + (q - packed_q).norm(dim=-1)
        whole = length[:, None] * self._per_query(q, self.k.norm(dim=-1)) * slack.dot_error(q.shape[-1])
        c = c + torch.where(self._per_query(q, self.exact), whole * abs(sm_scale), 0.0)
        if self.spared is not None:
            c = c + self._product(q - packed_q, self.spared) * (
                abs(sm_scale) * slack.dot_error(self.spared.shape[2] + 1)
            )
        return c + softmax_error(logits_soft_cap, bias)

    def value_radius(self, v_scale: float) -> Tensor:
        """rho ``[S, Hkv]``; infinite where never written."""
        rho = value_radius(self.v_steps, self.v.shape[-1]) * abs(v_scale)
        return torch.where(self.never, float("inf"), rho)

    def _product(self, q: Tensor, x: Tensor) -> Tensor:
        product: Tensor = q.norm(dim=-1)[:, None] * self._per_query(q, x.norm(dim=-1))
        return product

    @staticmethod
    def _per_query(q: Tensor, side: Tensor) -> Tensor:
        spread: Tensor = side.T.repeat_interleave(q.shape[0] // side.shape[1], dim=0)
        return spread


def softmax_error(logits_soft_cap: float, bias: Tensor | float) -> Tensor:
    """Error of capping, biasing and exponentiating, as a radius."""
    fixed = slack.SOFTMAX + max(logits_soft_cap, 0.0) * slack.SOFTCAP
    c: Tensor = torch.as_tensor(bias, dtype=torch.float64).abs() * slack.BIAS + fixed
    return c


def read_packed(
    slots: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    pass_ids: Tensor,
    layer: int,
    head_ids: Sequence[int],
    key: DitherKey,
    witness: Tensor | None,
    repaired: RepairedPages | None,
    bypass: BypassedKeys | None,
) -> PackedTokens:
    """The tokens at ``slots [S]`` of caches ``[P, page_size, Hkv, D]``."""
    page_size, head_dim = k_codes.shape[1], k_codes.shape[3]
    ids = pass_ids[slots].to(torch.int64) & 0xFFFFFFFF
    u = rows(key, ids, layer, head_ids, head_dim)
    k_steps, v_steps = gather(k_scales, slots), gather(v_scales, slots)
    k, v = dequantize(gather(k_codes, slots), k_steps, u), dequantize(gather(v_codes, slots), v_steps)
    never = (ids == 0)[:, None].expand(k.shape[:2])
    exact = torch.zeros_like(never)
    spared = None
    if bypass is not None:
        spared = gather(bypass.k, slots).to(torch.float64)
        k = bypass.put(k, spared)
    if repaired is not None:
        entry = repaired.index[slots // page_size].to(torch.int64)
        exact, offset = entry >= 0, (slots % page_size)[:, None]
        whole = repaired.k[entry, offset].to(torch.float64)
        k = torch.where(exact[..., None], whole, k)
        v = torch.where(exact[..., None], repaired.v[entry, offset].to(torch.float64), v)
        k_steps, v_steps = (torch.where(exact[..., None], 0.0, x) for x in (k_steps, v_steps))
        never = never & ~exact
        if bypass is not None and spared is not None:
            spared = torch.where(exact[..., None], 0.0, spared)
    seen = None if witness is None else gather(witness, slots)
    return PackedTokens(k, v, k_steps, v_steps, seen, never, exact, bypass, spared)


def decode_reference(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    table: PageTable,
    pass_ids: Tensor,
    *,
    layer: int,
    head_ids: Sequence[int],
    key: DitherKey,
    sm_scale: float,
    v_scale: float = 1.0,
    delta_loc: Tensor | None = None,
    witness: Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_len: int = 1,
    repaired: RepairedPages | None = None,
    bypass: BypassedKeys | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[R, H, Dv]``, base-2 lse ``[R, H]`` and accumulators ``[R, H, 16]``, all float64.

    ``R = B * q_len`` rows; row ``i`` of a request sees its tokens up to ``length - q_len + i``. Arguments as
    in :func:`witcert_core.kernels.decode.decode_int8`, codes already split into ``[P, page_size, Hkv, D]``.
    """
    num_rows, heads = q.shape[:2]
    page_size, v_dim = k_codes.shape[1], v_codes.shape[-1]
    out = torch.zeros(num_rows, heads, v_dim, dtype=torch.float64)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    acc = torch.full((num_rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float64)
    lengths = table.lengths(page_size)
    for r in range(num_rows):
        request, step = divmod(r, q_len)
        position = lengths[request] - q_len + step
        first = max(position - window_left, 0) if window_left >= 0 else 0
        if position < 0:
            continue
        slots = table.slots(request, position + 1, page_size)[first:]
        tokens = read_packed(
            slots,
            k_codes,
            v_codes,
            k_scales,
            v_scales,
            pass_ids,
            layer,
            head_ids,
            key,
            witness,
            repaired,
            bypass,
        )
        row, v = q[r].to(torch.float64), tokens.v * v_scale
        groups = heads // v.shape[1]
        z = attention_logits(row, tokens.k, sm_scale, logits_soft_cap)
        bias: Tensor | float = 0.0
        if alibi_slopes is not None:
            distance = torch.arange(first, position + 1, dtype=torch.float64) - position
            bias = alibi_slopes.to(torch.float64)[:, None] * distance
            z = z + bias
        delta = 0.0 if delta_loc is None else float(delta_loc[r])
        digits = q.dtype != torch.float32
        c = tokens.key_radius(row, sm_scale, delta, slots.numel(), logits_soft_cap, bias, digits)
        acc[r] = accumulate(z, c, v, tokens.value_radius(v_scale), sinks)
        # Around 0, as in the kernel, which does not know its output before it has seen all values.
        largest = v.square().sum(dim=-1).sqrt().amax(dim=0).repeat_interleave(groups)
        known = acc[r, :, AccField.V_RADIUS].isfinite()
        acc[r, :, AccField.V_RADIUS] = torch.where(known, largest, float("inf"))
        extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
        total = torch.logsumexp(extended, dim=-1)
        lse[r] = total / math.log(2.0)
        weight = torch.exp(z - total[:, None])
        out[r] = torch.einsum("hs,shd->hd", weight, v.repeat_interleave(groups, dim=1))
    return out, lse, acc
