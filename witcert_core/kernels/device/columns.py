"""Tiles of fewer than eight columns, and the eight that tensor cores take."""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"
# Triton has no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x, M: tl.constexpr):
    """``x [.., M]`` with every column followed by one of zeros where ``M`` is less than the 8 of a tensor core."""
    if M < 8:
        return tl.reshape(tl.join(x, tl.zeros_like(x)), x.shape[:-1] + (2 * M,))
    else:
        return x


@triton.jit
def narrow(x, M: tl.constexpr):
    """The first columns of what :func:`widen` made, ``[.., M]``."""
    if M < 8:
        first, _ = tl.split(tl.reshape(x, x.shape[:-1] + (M, 2)))
        return first
    else:
        return x
