"""Rounding constants of the fp32 kernels, shared by device code and references, each with its reason.

The claim of the meter includes the kernel's own arithmetic: a token's radius is its quantization radius plus
``omega``, a bound on the error of its fp32 logit and of the exponential taken of it. What becomes of a weight after
that (its cast, the product with V) is added where cells are made of sums (``kernel_error.py``).
"""

from __future__ import annotations

SPLIT_TOKENS = 512
"""Tokens of one split. Fixed, so that a row's result does not depend on the batch it is in."""
MAX_KV_LEN = 2**19
"""Longest request: 1024 splits keep the fp32 sums within the 2^-12 that ``accumulate.SUM_SLACK`` grants."""

RADIUS_UP = 1.0 + 2.0**-16
"""Covers fp32 sums over up to 32 groups or bands, a square root and a logarithm in a radius."""
SUM_UP = 1.0 + 2.0**-12
"""Outward factor of a sum; its own error stays below 2^-12 (at most 2^11 sequential terms, exponential
2^-17)."""
SOFTMAX = 2.0**-20 + 2.0**-40
"""Exponential, fp32 sum and division, and products that underflow in a radius. It also keeps every radius,
the sink's included, so far above 0 that no sum of the meter underflows."""
SOFTCAP = 2.0**-21
"""Error of ``cap * tanh(z / cap)``, as a share of the cap."""
FAR = 2.0**-22
"""Rounding of ``z - max`` before the exponential, as a share of it."""
MAX_CODE = 127.5
"""``|code| + |u|`` at most: what the INT8 dot product's rounding is proportional to, in units of the
scale."""
LOST_WEIGHT = 2.0**-120
"""More than any weight that fp32 flushes to zero; the sums over the rest are raised by this for every
token."""

META_FIELDS = 16
"""Floats of meter state per (row, head, split) in the workspace."""


def dot_error(channels: int) -> float:
    """Relative error of an fp32 dot product over ``channels`` products, whatever the order or the unit.

    ``(channels + 2) 2^-23``: tensor cores truncate, so a unit is taken per addition where IEEE has half of
    one.
    """
    return (channels + 2) * 2.0**-23


CHAIN = 16
"""Products that the kernels for CPUs add one after the other; then they add such sums."""


def chain_error(channels: int) -> float:
    """Error of a logit of the kernels for CPUs as a share of ``sum_i |q_i| |k_i|``: IEEE products and sums in chains of
    `CHAIN`, their sums, the softmax scale, and the factor to base 2, which is no float32."""
    return (CHAIN + -(-channels // CHAIN) + 4) * 2.0**-24


def int8_dot_error(num_groups: int) -> float:
    """The same for ``sum_g s_g (<q_g, code_g> - kappa_g)``: groups of 32, then one term per group and 8
    more."""
    return (32 + num_groups + 8) * 2.0**-23
