"""Channel pairs of K that stay in 16 bit beside the packed codes: outliers, which would set their group's scale.

Shapes: N tokens, S read, Hkv KV heads, D head_dim, m bypassed pairs, C = 2 m channels.

A bypassed channel is left out of its group's ``amax``, has code 0 and is read as the 16-bit number it is. Which pairs
is decided once a layer, from the first keys written (`serving/outliers.py` says how many): those with the largest
magnitude. They depend on no dither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.quantizers.rotary import RotarySpec

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def outlier_channels(keys: Tensor, rotary: RotarySpec, pairs: int) -> Tensor:
    """int64 [Hkv, C]: the channels of the `pairs` rotary pairs with the largest |k| among keys [N, Hkv, D].

    Pair by pair, ascending, lower channel first. A channel that is no number counts as the largest.
    """
    if keys.shape[0] < 1 or not 1 <= pairs <= rotary.n_pairs:
        raise InputError(f"{pairs} pairs of {rotary.n_pairs} from {keys.shape[0]} keys; both must be at least 1")
    channels = rotary.pair_channels().to(keys.device)
    largest = keys.abs().float().nan_to_num(nan=float("inf")).amax(0)  # [Hkv, D]
    by_pair = largest[:, channels].amax(-1)
    chosen = by_pair.topk(pairs, dim=1).indices.sort(dim=1).values
    return channels[chosen].flatten(1)


def without(x: Tensor, channels: Tensor) -> Tensor:
    """x [N, Hkv, D] with zeros at the channels [Hkv, C] of each head."""
    return x.scatter(2, channels.expand(x.shape[0], -1, -1), 0.0)


def taken(x: Tensor, channels: Tensor) -> Tensor:
    """[N, Hkv, C]: x [N, Hkv, D] at the channels [Hkv, C] of each head."""
    return x.gather(2, channels.expand(x.shape[0], -1, -1))


def put(x: Tensor, channels: Tensor, values: Tensor) -> Tensor:
    """x [N, Hkv, D] with values [N, Hkv, C] at the channels [Hkv, C] of each head."""
    return x.scatter(2, channels.expand(x.shape[0], -1, -1), values.to(x))


def masked_query(q: Tensor, channels: Tensor) -> Tensor:
    """q [H, D] with zeros where its KV head is bypassed: no scale, dither or witness speaks of those channels."""
    group = q.shape[0] // channels.shape[0]
    return q.scatter(1, channels.repeat_interleave(group, 0), 0.0)
