"""Decode attention over INT8 pages in float64, and the accumulators the kernel must not fall below."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache.radii import radius_dither, radius_group_witness
from witcert_core.kernels.host import slack
from witcert_core.kernels.host.arguments import DitherOf, PackedCache
from witcert_core.kernels.host.bypass import BypassedKeys
from witcert_core.kernels.host.dispatch import resolve
from witcert_core.kernels.host.pages import PageTable, gather
from witcert_core.meter.attention import AttentionSpec
from witcert_core.meter.contraction import contract_up
from witcert_core.meter.sums import NUM_ACC_FIELDS, AccField, accumulate
from witcert_core.quantizers.dither import dither_vectors


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

    k ``[S, Hkv, D]``, v ``[S, Hkv, Dv]`` as read; steps ``[S, Hkv, Gr]``; ``witness`` as stored; ``never`` written
    ``[S, Hkv]``; bypassed keys ``spared [S, Hkv, 2 m]``.
    """

    k: Tensor
    v: Tensor
    k_steps: Tensor
    v_steps: Tensor
    witness: Tensor | None
    never: Tensor
    bypass: BypassedKeys | None
    spared: Tensor | None

    def key_radius(self, q: Tensor, spec: AttentionSpec, delta_loc: float, num_visible: int, digits: bool) -> Tensor:
        """``c [H, S]`` of ``q [H, D]``: quantization radius plus the arithmetic of the kernel (``host/slack.py``),
        which takes queries as ``digits`` (:func:`lost_share`) or in fp32."""
        sm_scale = spec.sm_scale
        packed_q = q if self.bypass is None else self.bypass.spare(q)
        s = torch.where(self.k_steps >= 0, self.k_steps, float("inf"))
        s = torch.where(self.never[:, :, None], float("inf"), s.to(torch.float64))
        c = radius_dither(packed_q, s, sm_scale, delta_loc, num_visible)
        if self.witness is not None:
            c = torch.minimum(c, radius_group_witness(packed_q, s, self.witness, sm_scale))
        half_steps = radius_dither(packed_q, s, sm_scale, 0.0, num_visible)
        lost = lost_share(packed_q) if digits else 0.0
        c = c + half_steps * (2.0 * slack.MAX_CODE * (slack.int8_dot_error(s.shape[-1]) + lost))
        if self.spared is not None:
            sizes = self.spared.norm(dim=-1).T.repeat_interleave(q.shape[0] // self.spared.shape[1], dim=0)
            product = (q - packed_q).norm(dim=-1)[:, None] * sizes
            c = c + product * (abs(sm_scale) * slack.dot_error(self.spared.shape[2] + 1))
        return c + softmax_error(spec)

    def value_radius(self) -> Tensor:
        """rho ``[S, Hkv]``; infinite where never written."""
        return torch.where(self.never, float("inf"), value_radius(self.v_steps, self.v.shape[-1]))


def softmax_error(spec: AttentionSpec) -> float:
    """Error of capping and exponentiating, as a radius."""
    return slack.SOFTMAX + max(spec.logits_soft_cap, 0.0) * slack.SOFTCAP


def product_radii(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """``[H, S]`` error of the logits of ``q [H, D]`` over exact keys ``k [S, Hkv, D]`` in the kernel that ``auto``
    takes, and in an engine's as that one knows it: Triton's by the lengths of both, the compiled one's at least."""
    channels, groups = q.shape[1], q.shape[0] // k.shape[1]
    if resolve("auto", q.device) == "cpu":
        products = contract_up(q.abs(), k.abs(), spec.sm_scale)
        return products * slack.chain_error(channels), products * slack.dot_error(channels)
    lengths = q.norm(dim=-1)[:, None] * k.norm(dim=-1).T.repeat_interleave(groups, dim=0)
    error = lengths * (abs(spec.sm_scale) * slack.dot_error(channels))
    return error, error


def read_packed(slots: Tensor, cache: PackedCache, dither: DitherOf) -> PackedTokens:
    """The tokens at ``slots [S]``."""
    ids = cache.pass_ids[slots].to(torch.int64) & 0xFFFFFFFF
    u = dither_vectors(dither.key, ids, dither.layer, cache.head_ids.tolist(), cache.k.shape[3])
    k_steps, v_steps = gather(cache.k_scales, slots), gather(cache.v_scales, slots)
    k, v = dequantize(gather(cache.k, slots), k_steps, u), dequantize(gather(cache.v, slots), v_steps)
    spared = None
    if cache.bypass is not None:
        spared = gather(cache.bypass.k, slots).to(torch.float64)
        k = cache.bypass.put(k, spared)
    witness = None if cache.witness is None else gather(cache.witness, slots)
    never = (ids == 0)[:, None].expand(k.shape[:2])
    return PackedTokens(k, v, k_steps, v_steps, witness, never, cache.bypass, spared)


def row_results(z: Tensor, c: Tensor, v: Tensor, rho: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[H, Dv]``, base-2 lse ``[H]`` and accumulators ``[H, 16]`` of logits and radii ``[H, S]``, values
    ``[S, Hkv, Dv]`` and their radii ``[S, Hkv]``."""
    groups = z.shape[0] // v.shape[1]
    acc = accumulate(z, c, v, rho, sinks)
    # Around 0, as in the kernel, which does not know its output before it has seen all values.
    largest = v.norm(dim=-1).amax(dim=0).repeat_interleave(groups)
    known = acc[:, AccField.V_RADIUS].isfinite()
    acc[:, AccField.V_RADIUS] = torch.where(known, largest, float("inf"))
    extended = z if sinks is None else torch.cat((z, sinks.to(torch.float64)[:, None]), dim=-1)
    total = torch.logsumexp(extended, dim=-1)
    weight = torch.exp(z - total[:, None])
    out = torch.einsum("hs,shd->hd", weight, v.repeat_interleave(groups, dim=1))
    return out, total / math.log(2.0), acc


def decode_reference(
    q: Tensor,
    cache: PackedCache,
    table: PageTable,
    dither: DitherOf,
    spec: AttentionSpec,
    delta_loc: Tensor | None,
    *,
    q_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[R, H, Dv]``, base-2 lse ``[R, H]`` and accumulators ``[R, H, 16]``, all float64.

    ``R = B * q_len`` rows ``q [R, H, D]``; row ``i`` of a request sees its tokens up to ``length - q_len + i``.
    ``delta_loc [R]``.
    """
    num_rows, heads = q.shape[:2]
    out = torch.zeros(num_rows, heads, cache.v.shape[-1], dtype=torch.float64)
    lse = torch.full((num_rows, heads), float("-inf"), dtype=torch.float64)
    acc = torch.full((num_rows, heads, NUM_ACC_FIELDS), float("inf"), dtype=torch.float64)
    lengths = table.lengths(cache.page_size)
    for r in range(num_rows):
        request, step = divmod(r, q_len)
        position = lengths[request] - q_len + step
        if position < 0:
            continue
        slots = spec.visible(table.slots(request, position + 1, cache.page_size))
        tokens, row = read_packed(slots, cache, dither), q[r].to(torch.float64)
        delta = 0.0 if delta_loc is None else float(delta_loc[r])
        c = tokens.key_radius(row, spec, delta, slots.numel(), q.dtype != torch.float32)
        z = spec.logits(row, tokens.k)
        out[r], lse[r], acc[r] = row_results(z, c, tokens.v, tokens.value_radius(), spec.sinks)
    return out, lse, acc
