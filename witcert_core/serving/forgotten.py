"""Request ids that were let go of before their requests had ended, in bounded memory."""

from __future__ import annotations

from hashlib import blake2b

_BITS = 2**23
_HASHES = 4


class Forgotten:
    """A set that may take an id for one of its own that is none, never the other way round (a Bloom filter, 1 MiB).

    Of ids never added one in a million is taken for one after 60,000 additions, one in fifty after a million.
    """

    def __init__(self) -> None:
        self._bits: bytearray | None = None

    def add(self, request_id: str) -> None:
        if self._bits is None:
            self._bits = bytearray(_BITS // 8)
        for place in _places(request_id):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, request_id: str) -> bool:
        bits = self._bits
        return bits is not None and all(bits[place >> 3] >> (place & 7) & 1 for place in _places(request_id))


def _places(request_id: str) -> list[int]:
    """The bits of an id; the same in every process, so that all ranks forget alike."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=4 * _HASHES).digest()
    return [int.from_bytes(digest[i : i + 4], "little") % _BITS for i in range(0, len(digest), 4)]
