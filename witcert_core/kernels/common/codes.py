"""int8 codes: the sum of their squares, and their conversion to bfloat16.

The conversion is one instruction a code where Triton's own takes several. Under the interpreter the same numbers come
from plain arithmetic; on a GPU ``bench/gpu.sh`` holds them to it.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.common.backend import interpreting

_ON_GPU = tl.constexpr(not interpreting())
_BFLOAT16 = tl.constexpr(
    """
    {
    .reg .b32 low, high, a, b, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    lop3.b32 a, low, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, low, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, a, one, b;
    lop3.b32 a, high, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, high, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $1, a, one, b;
    }
    """
)
"""A byte's low seven bits over the exponent of 128 are ``128 + (code mod 128)``; its sign bit over that of -128 makes
-256 of it where the code is negative. Their sum is the code, exactly."""


@triton.jit
def code_squares(v):
    """``sum_i v_i^2`` fp32 ``[N, GV]`` of int8 codes ``[N, GV, 32]``; exact, ``32 * 127^2`` being below 2^24.

    Four at a time (``dp4a``) would be shorter, but which codes of a tile share a register is the compiler's doing.
    """
    wide = v.to(tl.int32)
    return tl.sum(wide * wide, 2).to(tl.float32)


@triton.jit
def weighable(v, P_DTYPE: tl.constexpr):
    """Values in the dtype of the weights; codes exactly."""
    if _ON_GPU and v.dtype == tl.int8 and tl.bfloat16 == P_DTYPE:
        # Two operands, of which one is not read: Triton then converts before it turns the tile, so that shared memory
        # holds 16-bit numbers, which it can turn, and not bytes, which it cannot.
        return tl.inline_asm_elementwise(_BFLOAT16, "=r,=r,r,r", [v, v], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        return v.to(P_DTYPE)
