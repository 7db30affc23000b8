"""A quantizer that saves memory, as a plugin: what is stored of a token, and what it stands for."""

from collections.abc import Mapping

from torch import Tensor

from witcert_core import Part, quantizer


def decode(parts: Mapping[str, Part], *, bits: int) -> Tensor:
    """Codes times their scale."""
    return (parts["codes"].values.float() - 2 ** (bits - 1)) * parts["scale"].values.float()


@quantizer("example_packed", decode=decode)
def encode(x: Tensor, *, bits: int = 4) -> dict[str, Part]:
    """Symmetric integers of `bits` bits with one float16 scale a token and head."""
    most = 2 ** (bits - 1)
    scale = (x.abs().amax(-1, keepdim=True) / (most - 1)).clamp(1e-7, 65504).half()
    codes = (x / scale.float()).round().clamp(-most, most - 1).nan_to_num(0) + most
    return {"codes": Part(codes.byte(), bits), "scale": Part(scale, 16)}
