"""K channels that stay in 16 bit beside the packed cache: outliers, which would otherwise set their group's scale.

Shapes: P pages of ``page_size`` slots, Hkv KV heads, D channels, m bypassed channel pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from witcert_core.cache import outliers
from witcert_core.errors import InputError
from witcert_core.kernels.host.pages import check_side


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
        channels: Tensor,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BypassedKeys:
        """Empty pool for ``channels`` int ``[Hkv, 2 m]``, as :func:`outliers.outlier_channels` chooses.

        Raises:
            InputError: a channel named twice or not there.
        """
        listed = channels.to(torch.int64).cpu()
        if listed.dim() != 2 or not 1 <= listed.shape[1] <= head_dim:
            raise InputError(f"channels is {tuple(listed.shape)}; it must be [Hkv, 2 m] with 2 m in 1..{head_dim}")
        ordered = listed.sort(dim=1).values
        if int(ordered.min()) < 0 or int(ordered.max()) >= head_dim or bool((ordered.diff(dim=1) == 0).any()):
            raise InputError(
                f"channels are {listed.tolist()}; they must be different in each row and within 0..{head_dim - 1}"
            )
        heads, count = listed.shape
        keep = torch.ones(heads, head_dim, dtype=torch.uint8).scatter(1, listed, 0)
        return cls(
            listed.to(device=device, dtype=torch.int32),
            keep.to(device),
            torch.zeros(num_pages, page_size, heads, count, dtype=dtype, device=device),
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

    @property
    def index(self) -> Tensor:
        """``channels`` as torch indexes with them, int64."""
        return self.channels.to(torch.int64)

    def spare(self, q: Tensor) -> Tensor:
        """``q [Hq, D]`` with 0 in the bypassed channels of its KV head."""
        return outliers.masked_query(q, self.index)

    def put(self, keys: Tensor, stored: Tensor) -> Tensor:
        """``keys [S, Hkv, D]`` with the bypassed channels replaced by ``stored [S, Hkv, 2 m]``."""
        return outliers.put(keys, self.index, stored)
