"""How many rows were metered of requests that were let go of before they had ended, in bounded memory."""

from __future__ import annotations

from array import array
from hashlib import blake2b

_CELLS = 2**20
_HASHES = 4


class Forgotten:
    """Request ids with their counts, never too low (a count-min sketch of maxima, 8 MiB once something is in it).

    An id that was never added may be taken for one that was: one in 400 after 65,536 additions, one in a hundred after
    100,000, most after a million. Its count is then as high as some other's.
    """

    def __init__(self) -> None:
        self._cells: array[int] | None = None

    def add(self, request_id: str, metered: int) -> None:
        """Remember that `metered` rows, at least 0, of a request were metered."""
        if self._cells is None:
            self._cells = array("Q", bytes(8 * _CELLS))
        for place in _places(request_id):
            self._cells[place] = max(self._cells[place], metered + 1)

    def metered(self, request_id: str) -> int | None:
        """At least as many rows as were metered of the request; None if it was never added."""
        if self._cells is None:
            return None
        least = min(self._cells[place] for place in _places(request_id))
        return least - 1 if least else None


def _places(request_id: str) -> list[int]:
    """The cells of an id; the same in every process, so that all ranks forget alike."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=4 * _HASHES).digest()
    return [int.from_bytes(digest[i : i + 4], "little") % _CELLS for i in range(0, len(digest), 4)]
