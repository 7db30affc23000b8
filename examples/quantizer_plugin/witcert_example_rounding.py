"""A quantizer as a plugin: one function."""

from torch import Tensor

from witcert_core import quantizer


@quantizer("example_rounding", bytes=lambda head_dim: 2.0 * head_dim)
def example_rounding(x: Tensor, *, step: float = 0.0625) -> Tensor:
    """Every number to the nearest multiple of `step`, in int8: saturates at 127 steps."""
    return (x / step).round().clamp(-127, 127) * step
