"""Bytes of the packed INT8 cache and order of the accumulator fields."""

from __future__ import annotations

from dataclasses import dataclass

from witcert_core.errors import InputError
from witcert_core.quantizers.dither import GROUP, num_groups


@dataclass(frozen=True)
class KVLayout:
    """Byte layout of one token and KV head of the packed INT8 cache, K then V.

    ``k_codes``: int8, one a channel; ``k_scales``: fp16, one for each 32 channels; ``k_bypass``: two 16-bit numbers a
    bypassed pair, pairs ascending, the lower channel first (their codes are 0, and their magnitude does not count
    for the scale); ``k_witness``: uint8, one a scale; ``v_codes`` and ``v_scales`` as for K. Numbers are
    little-endian. The kernels keep each field in a tensor of its own, so that codes stay aligned.

    Args:
        head_dim: K channels ``D``.
        v_head_dim: V channels, default ``D``.
        bypass_pairs: K channel pairs kept in 16 bit beside the (zeroed) codes.
        stored_witness: one residual-norm byte per K group.
        values_in_keys: V is a part of K (multi-head latent attention), so that nothing is kept of it.
    """

    head_dim: int
    v_head_dim: int | None = None
    bypass_pairs: int = 0
    stored_witness: bool = False
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 1 or (self.v_dim < 1 and not self.values_in_keys):
            raise InputError(f"head_dim={self.head_dim}, v_head_dim={self.v_dim}; both must be at least 1")
        if not 0 <= self.bypass_pairs <= self.head_dim // 2:
            raise InputError(f"bypass_pairs is {self.bypass_pairs}; allowed are 0..{self.head_dim // 2}")
        if self.values_in_keys and self.v_head_dim is not None:
            raise InputError(
                f"v_head_dim is {self.v_head_dim}; values that are a part of keys have no width of their own"
            )

    @property
    def v_dim(self) -> int:
        """Channels kept of V."""
        if self.values_in_keys:
            return 0
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (byte offset, bytes), in storage order; absent fields are left out."""
        sizes = {
            "k_codes": self.head_dim,
            "k_scales": 2 * num_groups(self.head_dim, GROUP),
            "k_bypass": 4 * self.bypass_pairs,
            "k_witness": num_groups(self.head_dim, GROUP) if self.stored_witness else 0,
            "v_codes": self.v_dim,
            "v_scales": 2 * num_groups(self.v_dim, GROUP) if self.v_dim else 0,
        }
        table: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in sizes.items():
            if size:
                table[name] = (offset, size)
            offset += size
        return table

    @property
    def bytes_per_token_head(self) -> int:
        """272 at D = 128; 276 with the witness; 288 with 4 bypassed pairs; 172 at D = 80; 612 of 576 latent
        and rotated channels."""
        return sum(size for _, size in self.fields().values())

    def capacity_ratio(self) -> float:
        """Tokens per byte against a 16-bit cache of the same head: ``2 (D + Dv) / bytes``."""
        return 2.0 * (self.head_dim + self.v_dim) / self.bytes_per_token_head
