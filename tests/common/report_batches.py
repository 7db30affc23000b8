"""Made-up measurements for the tests of reports."""

from __future__ import annotations

import torch
from torch import Tensor

from witcert_core import CellBatch, Policy
from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.policy.model import parse_policy


def make_policy(quantizer: str = "int4_token_group", **sections: object) -> Policy:
    return parse_policy({"version": 1, "quantizer": {"name": quantizer}, **sections})


def batch(
    meter: list[list[float]] | Tensor,
    *,
    form: str | Tensor = "jensen",
    tv: list[list[float]] | Tensor | None = None,
    delta_loc: float = 0.0,
    log_a: float | Tensor = 0.5,
    out_bound: float | Tensor = 0.25,
    out_norm: float | Tensor = 1.0,
    floor: float | Tensor = 0.0,
    quantized: list[list[int]] | None = None,
    excess: list[list[float]] | None = None,
) -> CellBatch:
    """A CellBatch with these meters [R, H]; scalars are spread over all cells."""
    meters = torch.as_tensor(meter, dtype=torch.float64)

    def spread(value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(meters.shape).clone()

    forms = torch.full(meters.shape, FORM_NAMES.index(form)) if isinstance(form, str) else form
    return CellBatch(
        acc=torch.full((*meters.shape, 16), 0.75, dtype=torch.float64),
        meter=meters,
        form=forms,
        log_a=spread(log_a),
        out_bound=spread(out_bound),
        out_norm=spread(out_norm),
        num_visible=torch.full((meters.shape[0],), 9),
        num_quantized=torch.full(meters.shape, 7) if quantized is None else torch.tensor(quantized),
        tv_audit=None if tv is None else torch.as_tensor(tv, dtype=torch.float64),
        delta_loc=torch.full((meters.shape[0],), delta_loc, dtype=torch.float64),
        floor=spread(floor),
        excess=None if excess is None else torch.tensor(excess, dtype=torch.float64),
    )
