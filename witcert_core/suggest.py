"""One way to say what was meant and what is allowed, shared by every user-facing error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: object, allowed: Iterable[str]) -> str:
    """' (did you mean 'x'?)' for the closest allowed word, whatever its case; '' when none is close."""
    words = {word.casefold(): word for word in allowed}
    close = get_close_matches(str(given).casefold(), list(words), n=1, cutoff=0.6)
    return f" (did you mean {words[close[0]]!r}?)" if close else ""


def listed(allowed: Iterable[str]) -> str:
    """The allowed words as one comma-separated line."""
    return ", ".join(allowed)
