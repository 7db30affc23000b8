"""int8 codes four to a register: the sum of their squares, and their conversion to bfloat16.

Both are one or two instructions a code where Triton's own are up to five. Under the interpreter the same numbers come
from plain arithmetic; on a GPU ``bench/gpu.sh`` holds them to it.
"""

# Triton functions are compiled from their source, so their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from witcert_core.kernels.host.dispatch import interpreting

_ON_GPU = tl.constexpr(not interpreting())
_SQUARES = tl.constexpr("dp4a.s32.s32 $0, $1, $1, 0;")
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
def code_squares(at, D: tl.constexpr, GV: tl.constexpr):
    """``sum_i v_i^2`` fp32 ``[N, GV]`` of the ``D`` int8 codes from ``at [N]``; exact, ``32 * 127^2`` being below 2^24.

    They are read once more, as words: which codes of a tile lie side by side in registers is the compiler's doing, and
    four of a word are of one token and group whatever it does. ``at`` and ``D`` must be multiples of 4.
    """
    word = (tl.arange(0, GV) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    pointer = at.to(tl.pointer_type(tl.int32))[:, None, None] + word
    if GV * 32 > D:
        words = tl.load(pointer, mask=word * 4 < D, other=0)
    else:
        words = tl.load(pointer)
    if _ON_GPU:
        squares = tl.inline_asm_elementwise(_SQUARES, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        squares = words * 0
        for byte in tl.static_range(4):
            code = (words << (24 - 8 * byte)) >> 24
            squares += code * code
    return tl.sum(squares, 2).to(tl.float32)


@triton.jit
def weighable(v, P_DTYPE: tl.constexpr):
    """Values in the dtype of the weights; codes exactly."""
    if _ON_GPU and v.dtype == tl.int8 and tl.bfloat16 == P_DTYPE:
        # Two operands, of which one is not read: Triton then converts before it turns the tile, so that shared memory
        # holds 16-bit numbers, which it can turn, and not bytes, which it cannot.
        return tl.inline_asm_elementwise(_BFLOAT16, "=r,=r,r,r", [v, v], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        return v.to(P_DTYPE)
