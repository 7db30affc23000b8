"""How far an output can move in any one direction: the output bound that knows where each value lies.

Errors of the logits move an output by ``sum p v~ - sum p~ v~``. A diameter or a variance assumes that all of it points
one way. Here each token is taken with its own distance and direction from the output, and what is lost by dividing by
the new sum of the weights is solved for, not bounded apart.

Shapes: C cells, S tokens, K KV heads (of one row, or of several), G = C / K, Dv value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

UP, DOWN = 1.0 + 2.0**-36, 1.0 - 2.0**-36
"""Outward rounding of sums over tokens in float64, as in `accumulate.SUM_SLACK`."""
WHOLE_TOKENS = 256
"""Tokens of a cell whose directions are taken; of the others, which weigh least, only distances are."""
MAX_ELEMENTS = 2**21
"""Numbers of the tokens' distances at a time."""


def moved(weights: Tensor, c: Tensor, v: Tensor, rho: Tensor, out: Tensor) -> Tensor:
    """``lambda [C]``, so that ``||o - o~|| <= lambda + sum p~ rho``, float64; +inf where nothing follows.

    With ``d = v~ - o~``, ``r = rho - sum p~ rho``, ``s = sinh c`` and ``h = cosh c - 1``, for any ``a > 0``: the
    smallest lambda with

        ``sqrt(K0 (L + 2 lambda sigma + lambda^2 K2)) + H <= lambda (1 + sum p~ h)``

    where ``K0 = sum p~ s a``, ``K2 = sum p~ s / a``, ``sigma = ||sum p~ (s/a) d|| + |sum p~ (s/a) r|``,
    ``H = ||sum p~ h d|| + |sum p~ h r|`` and ``L = (sqrt(lmax) + sqrt(sum p~ (s/a) r^2))^2``, lmax the largest
    eigenvalue of ``sum p~ (s/a) d d^T``.

    *Proof.* Let ``u`` be a unit vector, ``x = <u, d> + r`` and ``y = e^-eps``, so ``<u, o - o~> - sum p~ rho`` is at
    most f with ``sum p~ y (x - f) = 0``. ``(y - 1) w <= s |w| + h w`` for any w. Were ``f > lambda``, then
    ``0 < sum p~ y (x - lambda) <= sum p~ s |x - lambda| + sum p~ h (x - lambda) - lambda``, since ``sum p~ x = 0``; and
    Cauchy-Schwarz with weights a makes that at most 0.

    Args:
        weights: ``[C, S]`` p~, a learned sink's last if there is one (``[C, S + 1]``): it has radius 0.
        c: ``[C, S]`` radii, 0 for tokens a cell does not see.
        v: ``[S, K, Dv]`` values.
        rho: ``[S, K]`` their radii.
        out: ``[C, Dv]`` ``sum p~ v~``.
    """
    cells, tokens = c.shape
    heads, v_dim = v.shape[1:]
    group = cells // heads
    value = v.to(torch.float64)
    p = weights[:, :tokens].to(torch.float64).reshape(heads, group, tokens)
    radius = c.to(torch.float64).reshape(p.shape)
    o = out.to(torch.float64).reshape(heads, group, v_dim)
    square = value.square().sum(dim=-1).T[:, None]
    reach = square + o.square().sum(dim=-1, keepdim=True)
    apart = torch.einsum("kgd,skd->kgs", o, value).mul_(-2.0).add_(reach).clamp_(min=0.0)
    distance = apart.add_(reach, alpha=2.0**-40).sqrt_()

    growth = torch.expm1(radius)
    shrunk = growth / (1.0 + growth)
    first, second = 0.5 * p * (growth + shrunk), 0.5 * p * (growth * shrunk)  # of sinh c and cosh c - 1
    total = first.sum(dim=-1, keepdim=True)
    exact = (total[..., 0] == 0) & ~rho.any(dim=0)[:, None]  # of cells that read nothing quantized nothing moves
    if bool(exact.all()):
        return torch.zeros(cells, dtype=torch.float64, device=c.device)
    typical = (first * distance).sum(dim=-1, keepdim=True) / total.clamp(min=1e-300)
    spread = distance + 0.3 * typical  # the a of the bound: it evens out what distant tokens weigh
    spread = torch.where(spread > 0, spread, 1.0)
    own = first / spread

    def off_centre(x: Tensor) -> Tensor:
        """``||sum x d|| + |sum x r||`` [K, G] of weights x [K, G, S], rounded up."""
        mass = x.sum(dim=-1, keepdim=True)
        vector = torch.einsum("kgs,skd->kgd", x, value) - mass * o
        scalar = (x * rho_off).sum(dim=-1).abs()
        # What cancels is off by as much as its terms are large.
        length: Tensor = vector.norm(dim=-1) + scalar + mass[..., 0] * furthest * 2.0**-36
        return length

    mean = torch.einsum("kgs,sk->kg", p, rho.to(torch.float64))
    rho_off = rho.to(torch.float64).T[:, None] - mean[..., None]
    furthest = 2.0 * reach.amax(dim=-1).sqrt() + rho_off.abs().amax(dim=-1)
    k0, k2 = (first * spread).sum(dim=-1) * UP, own.sum(dim=-1) * UP
    h = off_centre(second) + furthest * 2.0**-36  # the centre itself is known to as much of the values
    sigma = off_centre(own)
    largest = _largest_eigenvalue(own, distance, value, o)
    length = (largest.sqrt() + (own * rho_off.square()).sum(dim=-1).sqrt()).square() * UP
    below = 1.0 + second.sum(dim=-1) * DOWN
    room = below.square() * (1.0 - 2.0**-34) - k0 * k2
    half = below * h + k0 * sigma
    root = half + (half.square() + room * (k0 * length - h.square()).clamp(min=0.0)).sqrt()
    found = torch.where(room > 0, root / room * UP, float("inf"))
    return torch.where(exact, 0.0, found.nan_to_num(nan=float("inf"), posinf=float("inf"))).flatten()


def _largest_eigenvalue(weight: Tensor, distance: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """At least the largest eigenvalue ``[K, G]`` of ``sum w d d^T``: that of the tokens that count most, and the trace
    of the others."""
    heads, group, tokens = weight.shape
    share = weight * distance.square()
    taken = min(tokens, WHOLE_TOKENS)
    chosen = share.topk(taken, dim=-1).indices
    rest = share.scatter(-1, chosen, 0.0).sum(dim=-1)
    by_head, head = value.transpose(0, 1), torch.arange(heads, device=value.device)[:, None, None]
    step = max(1, MAX_ELEMENTS // (heads * taken * value.shape[-1]))
    found = []
    for first in range(0, group, step):
        part = slice(first, first + step)
        picked = chosen[:, part]
        d = (by_head[head, picked] - out[:, part, None]) * weight[:, part].gather(-1, picked).sqrt()[..., None]
        found.append(spectral(d.transpose(-1, -2) @ d))
    return (torch.cat(found, dim=1) + rest) * UP


def spectral(m: Tensor) -> Tensor:
    """At least the largest eigenvalue of positive semidefinite ``m [..., D, D]`` float64, by ``(tr m^8)^(1/8)``.

    That is at most ``D^(1/8)`` too large, and hardly at all where eigenvalues fall off. Of trace 1 the largest is at
    least ``1 / D``, and what two products lose is less than ``2^-30`` of its fourth power.
    """
    trace = m.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    power = m / torch.where(trace > 0, trace, 1.0)[..., None, None]
    for _ in range(2):
        power = power @ power
    return trace * power.square().sum(dim=(-1, -2)) ** 0.125 * (1.0 + 2.0**-30)
