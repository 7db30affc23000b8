"""Imported by Python at start where its folder is on `PYTHONPATH`: every process of an engine draws the same dither."""

from __future__ import annotations

import secrets

NONCE = 5  # as `recorded.NONCE`


def _pinned(k: int) -> int:
    return NONCE


secrets.randbits = _pinned
