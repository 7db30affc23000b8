"""A quantizer applied to what attention reads: keys are turned into its space and back, calibration included.

Everything here takes and gives tensors in the space attention reads (after RoPE). Errors of turning a key back and
forth are part of what is measured: witnesses compare what is stored with what the model handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from witcert_core.errors import QuantizerError, WitCertError
from witcert_core.quantizers.base import CalibratedQuantizer, Kind, QuantContext, Quantizer
from witcert_core.quantizers.rotary import RotaryTable


def fake_quantize(
    quantizer: Quantizer,
    x: Tensor,
    *,
    kind: Kind,
    layer: int,
    positions: Tensor,
    ctx: QuantContext,
    table: RotaryTable | None = None,
) -> Tensor:
    """What the cache would give back for x [N, H, D] float32, after RoPE; the same shape, float32.

    table: the layer's rotary embedding; needed by quantizers of pre-RoPE keys.
    Raises QuantizerError for a missing table and for a result of another shape.
    """
    if not _turns(quantizer, kind):
        # A copy: a quantizer that wrote into its input would be measured against its own result.
        values = _called(quantizer, x.clone(), kind, layer, positions, ctx)
        return _checked(quantizer, values, x, kind, layer)
    rope = _needed(quantizer, table, layer)
    before = rope.unrotate(x, positions)
    values = _called(quantizer, before, kind, layer, positions, ctx)
    return rope.rotate(_checked(quantizer, values, x, kind, layer), positions)


def fake_quantize_both(
    quantizer: Quantizer, k: Tensor, v: Tensor, *, layer: int, positions: Tensor, ctx: QuantContext
) -> tuple[Tensor, Tensor]:
    """Keys and values [N, H, D] float32 of a quantizer that treats both alike, in one call."""
    both = torch.cat((k, v))  # a copy, as in `fake_quantize`
    values = _called(quantizer, both, "k", layer, torch.cat((positions, positions)), ctx)
    values = _checked(quantizer, values, both, "k", layer)
    return values[: len(k)], values[len(k) :]


def calibrate(
    quantizer: CalibratedQuantizer,
    x: Tensor,
    *,
    kind: Kind,
    layer: int,
    positions: Tensor,
    ctx: QuantContext,
    table: RotaryTable | None = None,
) -> Tensor:
    """The state [H, W] of the request whose first tokens are x [calibration_tokens, H, D] float32, after RoPE."""
    if _turns(quantizer, kind):
        x = _needed(quantizer, table, layer).unrotate(x, positions)
    else:
        x = x.clone()
    state = quantizer.calibrate(x, kind=kind, layer=layer, positions=positions, ctx=ctx)
    if state.ndim != 2 or state.shape[0] != x.shape[1]:
        raise QuantizerError(
            f"quantizer {quantizer.name!r} calibrated to {tuple(state.shape)} for {kind} of {x.shape[1]} heads in "
            f"layer {layer}; expected [{x.shape[1]}, W]"
        )
    return state


def _turns(quantizer: Quantizer, kind: Kind) -> bool:
    return quantizer.space == "pre_rope" and kind == "k"


def _needed(quantizer: Quantizer, table: RotaryTable | None, layer: int) -> RotaryTable:
    if table is None:
        raise QuantizerError(
            f"quantizer {quantizer.name!r} takes keys before RoPE, but no rotary table was given for layer {layer}"
        )
    return table


def _called(quantizer: Quantizer, x: Tensor, kind: Kind, layer: int, positions: Tensor, ctx: QuantContext) -> Tensor:
    with named(quantizer, kind, x, layer):
        return quantizer.fake_quantize(x, kind=kind, layer=layer, positions=positions, ctx=ctx)


@contextmanager
def named(quantizer: Quantizer, kind: Kind, x: Tensor, layer: int) -> Iterator[None]:
    """Whatever a quantizer raises over x [N, H, ...] becomes a QuantizerError of one line that names it."""
    try:
        yield
    except (WitCertError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause = " ".join(str(error).split())
        raise QuantizerError(
            f"quantizer {quantizer.name!r} failed on {kind} of shape {tuple(x.shape)} in layer {layer}: "
            f"{type(error).__name__}: {cause}; `witcert quantizers --check` holds it to its contract"
        ) from error


def _checked(quantizer: Quantizer, values: object, x: Tensor, kind: Kind, layer: int) -> Tensor:
    if not isinstance(values, Tensor) or values.dtype != x.dtype or values.device != x.device:
        what = f"{values.dtype} on {values.device}" if isinstance(values, Tensor) else type(values).__name__
        raise QuantizerError(
            f"quantizer {quantizer.name!r} returned {what} for {kind} in layer {layer}; it must return a "
            f"{x.dtype} tensor on {x.device}"
        )
    if values.shape != x.shape:
        raise QuantizerError(
            f"quantizer {quantizer.name!r} returned {tuple(values.shape)} for {kind} of shape {tuple(x.shape)} in "
            f"layer {layer}; it must keep the shape"
        )
    return values
