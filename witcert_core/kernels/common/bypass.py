"""K channels that stay in 16 bit beside the packed cache: outliers, which would otherwise set their group's scale.

Shapes: P pages of ``page_size`` slots, Hkv KV heads, D channels, m bypassed channel pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.errors import InputError
from witcert_core.kernels.common.pages import check_side
from witcert_core.rotary import RotarySpec


@dataclass(frozen=True)
class BypassedKeys:
    """The bypassed channels of one layer and their keys.

    A bypassed channel is left out of its group's ``amax``, has code 0 and contributes its 16-bit number exactly:
    neither scale nor dither nor witness speak of it. In memory (``KVLayout``, field ``k_bypass``) a token and
    head has ``2 m`` numbers in the order of ``channels``: pair by pair, ascending, lower channel first.

    Args:
        channels: int32 ``[Hkv, 2 m]``, all different within a head.
        keep: uint8 ``[Hkv, D]``, 0 at the bypassed channels, else 1.
        k: ``[P, page_size, Hkv, 2 m]`` in the dtype of the keys written, contiguous.
    """

    channels: Tensor
    keep: Tensor
    k: Tensor

    @classmethod
    def allocate(
        cls,
        pairs: Tensor,
        rotary: RotarySpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BypassedKeys:
        """Empty pool for ``pairs`` int ``[Hkv, m]``, indices of rotary pairs, a row for each KV head of this rank.

        Raises:
            InputError: a pair named twice or not there.
        """
        if pairs.dim() != 2 or not 1 <= pairs.shape[1] <= rotary.n_pairs:
            raise InputError(f"pairs is {tuple(pairs.shape)}; it must be [Hkv, m] with m in 1..{rotary.n_pairs}")
        ordered = pairs.to(torch.int64).cpu().sort(dim=1).values
        low, high = int(ordered.min()), int(ordered.max())
        if low < 0 or high >= rotary.n_pairs or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise InputError(
                f"pairs are {ordered.tolist()}; they must be different in each row and within 0..{rotary.n_pairs - 1}"
            )
        heads, count = ordered.shape
        channels = rotary.pair_channels()[ordered].reshape(heads, 2 * count)
        keep = torch.ones(heads, rotary.head_dim, dtype=torch.uint8).scatter(1, channels, 0)
        return cls(
            channels.to(device=device, dtype=torch.int32),
            keep.to(device),
            torch.zeros(num_pages, page_size, heads, 2 * count, dtype=dtype, device=device),
        )

    def check(self, k: Tensor, dtype: torch.dtype) -> None:
        """Raise unless this fits the codes ``k [P, page_size, Hkv, D]`` and keys or queries of ``dtype``."""
        heads, head_dim = k.shape[2:]
        count = self.channels.shape[-1]
        shapes = (tuple(self.channels.shape), tuple(self.keep.shape))
        if shapes != ((heads, count), (heads, head_dim)) or self.channels.dtype != torch.int32:
            raise InputError(
                f"the bypass has channels {self.channels.dtype} {shapes[0]} and keep {shapes[1]}; they must be "
                f"int32 [{heads}, 2 m] and [{heads}, {head_dim}]"
            )
        if self.keep.dtype != torch.uint8 or not (self.keep.is_contiguous() and self.channels.is_contiguous()):
            raise InputError(f"the bypass's keep is {self.keep.dtype}; it must be uint8, and both contiguous")
        if self.k.dtype != dtype:
            raise InputError(
                f"bypassed keys are kept as {self.k.dtype}, keys or queries are {dtype}; a cast would not be exact"
            )
        check_side("k_bypass", self.k, k, count, dtype)

    def spare(self, x: Tensor) -> Tensor:
        """``x [..., Hq, D]`` of query or KV heads with 0 in the bypassed channels of its KV head."""
        kept = self.keep.to(torch.bool).repeat_interleave(x.shape[-2] // self.keep.shape[0], dim=0)
        return torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def put(self, keys: Tensor, stored: Tensor) -> Tensor:
        """``keys [S, Hkv, D]`` with the bypassed channels replaced by ``stored [S, Hkv, 2 m]``."""
        index = self.channels.to(torch.int64).expand(keys.shape[0], -1, -1)
        return keys.scatter(2, index, stored.to(keys.dtype))
