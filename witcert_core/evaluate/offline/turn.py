"""One thread at a time: attention is told of one pass, and would take another thread's calls for its own."""

from __future__ import annotations

from threading import Lock, Thread, current_thread

from witcert_core.errors import UnsupportedError


class Turn:
    """Whose pass, or whose `generate`, is running."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Thread | None = None

    def begin(self) -> bool:
        """Take the turn; whether it was free before. UnsupportedError while another thread that still runs has it."""
        with self._lock:
            owner, mine = self._owner, current_thread()
            if owner is not None and owner is not mine and owner.is_alive():
                raise UnsupportedError(
                    f"thread {owner.name!r} is running this model under the meter, which follows one pass at a time; "
                    "wait for it, or put the prompts into one batch"
                )
            self._owner = mine
            return owner is not mine

    def end(self) -> None:
        self._owner = None

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner is current_thread()
