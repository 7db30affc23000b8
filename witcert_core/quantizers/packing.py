"""The parts that a coded quantizer stores, as bytes of one token and KV head, and back.

Shapes: N tokens, H KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError

MAX_WORD = 63
"""Bits of an int64 in which codes are put side by side before they are cut into bytes."""


@dataclass(frozen=True)
class Part:
    """One of the tensors a cache would keep: values [ROWS, H, ...], each element in `bits` bits.

    ROWS is N, or N / token_group for what a group shares. Integers below 2^bits, or floats of that width.

    Example:
        >>> import torch, witcert_core as wc
        >>> wc.Part(torch.zeros(10, 2, 64, dtype=torch.uint8), bits=4).nbytes
        640
    """

    values: Tensor
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes when every row and head is packed by itself."""
        rows = self.values.shape[0] * self.values.shape[1]
        return rows * packed_bytes(prod(self.values.shape[2:]), self.bits)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits, the last one filled up."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Integers [..., C] below 2^bits as uint8 [..., ceil(C * bits / 8)], the first in the low bits of the first byte.

    Raises QuantizerError for a width whose codes do not end with a byte within 63 bits.
    """
    size, _ = _word(bits)
    count = codes.shape[-1]
    if bits == 8:
        return codes.to(torch.uint8)
    padded = torch.nn.functional.pad(codes.to(torch.uint8 if size * bits == 8 else torch.int64), (0, -count % size))
    places = torch.arange(size, device=codes.device, dtype=padded.dtype) * bits
    words: Tensor = (padded.unflatten(-1, (-1, size)) << places).sum(-1, dtype=padded.dtype)
    if size * bits == 8:
        return words
    octets = torch.arange(0, size * bits, 8, device=codes.device)
    whole: Tensor = ((words[..., None] >> octets) & 0xFF).to(torch.uint8).flatten(-2)
    return whole[..., : packed_bytes(count, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` codes of `pack_bits`: uint8 or int64 [..., count]."""
    size, num_bytes = _word(bits)
    if bits == 8:
        return packed
    words = packed
    if num_bytes > 1:
        octets = torch.arange(0, size * bits, 8, device=packed.device)
        whole = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % num_bytes)).to(torch.int64)
        words = (whole.unflatten(-1, (-1, num_bytes)) << octets).sum(-1)
    places = torch.arange(size, device=packed.device, dtype=words.dtype) * bits
    codes: Tensor = (words[..., None] >> places) & (2**bits - 1)
    return codes.flatten(-2)[..., :count]


def _word(bits: int) -> tuple[int, int]:
    """The fewest codes that end with a byte, and how many bytes these are."""
    size = 8 // gcd(bits, 8) if bits > 0 else 0
    if not 0 < size * bits <= MAX_WORD:
        raise QuantizerError(
            f"codes of {bits} bits cannot be packed; allowed are 1 to 8, 10, 12, 14, 16, 24 and 32 bits"
        )
    return size, size * bits // 8


@dataclass(frozen=True)
class PartLayout:
    """One part of a token and KV head: its name, shape, dtype and bits an element."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int

    @property
    def nbytes(self) -> int:
        return packed_bytes(prod(self.shape), self.bits)


@dataclass(frozen=True)
class TokenLayout:
    """All bytes of one token and KV head, part after part: what a packed pool keeps of a key or of a value.

    Example:
        >>> import torch, witcert_core as wc
        >>> from witcert_core.quantizers.packing import TokenLayout
        >>> parts = {"codes": wc.Part(torch.tensor([[[1, 2, 3, 15]]]), 4), "size": wc.Part(torch.ones(1, 1).half(), 16)}
        >>> layout = TokenLayout.of(parts)
        >>> layout.nbytes, layout.pack(parts).tolist()
        (4, [[[33, 243, 0, 60]]])
    """

    parts: tuple[PartLayout, ...]

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> TokenLayout:
        """The layout of parts [N, H, ...]; QuantizerError for one that has not a row a token."""
        found = []
        for name, part in parts.items():
            values = part.values
            if values.is_floating_point() and 8 * values.element_size() != part.bits:
                raise QuantizerError(
                    f"part {name!r} is {values.dtype} in {part.bits} bits; floats are stored as they are"
                )
            if not values.is_floating_point():
                _word(part.bits)
            found.append(PartLayout(name, tuple(values.shape[2:]), values.dtype, part.bits))
        return cls(tuple(found))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def pack(self, parts: Mapping[str, Part]) -> Tensor:
        """Bytes uint8 [N, H, nbytes] of `parts` [N, H, ...]; QuantizerError for parts of another layout."""
        if TokenLayout.of(parts) != self:
            raise QuantizerError(
                f"its parts are {_said(TokenLayout.of(parts))} here and were {_said(self)} for zeros; what is stored "
                "of a token must have one layout"
            )
        return torch.cat([_octets(parts[part.name].values, part) for part in self.parts], -1)

    def unpack(self, packed: Tensor) -> dict[str, Part]:
        """The parts [N, H, ...] of bytes uint8 [N, H, nbytes]."""
        pieces = packed.split([part.nbytes for part in self.parts], -1)
        return {
            part.name: Part(_values(piece, part), part.bits) for piece, part in zip(pieces, self.parts, strict=True)
        }


def _octets(values: Tensor, part: PartLayout) -> Tensor:
    flat = values.reshape(*values.shape[:2], prod(part.shape))
    if values.is_floating_point():
        return flat.contiguous().view(torch.uint8)
    return pack_bits(flat, part.bits)


def _values(piece: Tensor, part: PartLayout) -> Tensor:
    if part.dtype.is_floating_point:
        # A copy: a slice that begins at an odd byte cannot be viewed, contiguous as it may be.
        values = piece.clone(memory_format=torch.contiguous_format).view(part.dtype)
    else:
        values = unpack_bits(piece, part.bits, prod(part.shape)).to(part.dtype)
    return values.reshape(*piece.shape[:2], *part.shape)


def _said(layout: TokenLayout) -> str:
    return ", ".join(f"{p.name} {list(p.shape)} of {p.bits} bits" for p in layout.parts) or "nothing"
