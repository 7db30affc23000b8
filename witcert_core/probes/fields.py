"""What a probe may ask about: the names of its language, one table.

Facts of a request come from the engine (`FACTS`), the others from the pass and from what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.meter.cells import CellBatch
from witcert_core.meter.sums import AccField

Kind = Literal["text", "number", "word", "measure"]
Value = str | int | float | Tensor
"""Of a request, a row or a layer; of cells a tensor [H]. A measure of a cell that has none is NaN."""

STATUSES = ("measured", "exact", "unknown")
PHASES = ("prompt", "generated")


@dataclass(frozen=True)
class Field:
    """kind: how it compares; words: of a `word`, all there are, each known by its place among them."""

    kind: Kind
    says: str
    words: tuple[str, ...] = ()


FIELDS: dict[str, Field] = {
    "request": Field("text", "the request's id, as `/witcert/requests/{id}` has it"),
    "lora": Field("text", 'name of the request\'s LoRA adapter; "" without one'),
    "prompt": Field("number", "tokens of the request's prompt"),
    "priority": Field("number", "the request's priority"),
    "phase": Field("word", "whether the row is of the prompt or was generated", PHASES),
    "position": Field("number", "position of the row's token, from 0"),
    "step": Field("number", "the row's number among the metered rows of its request, from 1"),
    "layer": Field("number", "layer of the model, from 0"),
    "head": Field("number", "query head, from 0, over all ranks"),
    "status": Field("word", "`measured`; `exact`: nothing quantized was read; `unknown`", STATUSES),
    "form": Field("word", "the bound that decided", tuple(FORM_NAMES)),
    "bound": Field("measure", "bound on the total variation of the attention weights"),
    "floor": Field("measure", "the total variation is at least this"),
    "log_a": Field("measure", "log A, unclipped"),
    "risk": Field("measure", "(A^2 - 1) / 2, which ranks saturated cells"),
    "out_bound_rel": Field("measure", "bound on the output's error, relative to the output's norm"),
    "radius": Field("measure", "largest radius of a logit"),
    "heaviest_share": Field("measure", "the heaviest token's share in the sum of p(e^c - 1); a ratio, no bound"),
}
MEASURES = tuple(name for name, field in FIELDS.items() if field.kind == "measure")
KEYS = tuple(name for name in FIELDS if name not in MEASURES and name not in ("position", "step"))
"""What an answer may be grouped by."""
CELL_KEYS = ("head", "status", "form")
"""Those that differ among the cells of one row and layer."""
FACTS = ("lora", "prompt", "priority")
"""What only an engine can say of a request; each adapter names those it does."""


def measures(cells: CellBatch, row: int) -> Mapping[str, Tensor]:
    """What was measured of row `row`: [H] by name, NaN for exact cells; status and form are places among their words.

    A cell whose output is not attention over what is stored has the bound 1 and no output bound.
    """
    wrong = torch.zeros(cells.meter.shape[1], dtype=torch.bool) if cells.excess is None else cells.excess[row] > 0
    exact = (cells.num_quantized[row] == 0) & ~wrong
    acc = cells.acc[row].to(torch.float64)
    log_a = _unbounded(cells.log_a[row])
    out = _unbounded(cells.out_bound[row]).masked_fill(wrong, torch.inf)
    relative = torch.where(out == 0, 0.0, _unbounded(out / cells.out_norm[row].to(torch.float64)))
    eta = acc[:, AccField.ETA]
    heaviest = acc[:, AccField.P_H] * torch.expm1(acc[:, AccField.C_H]) / eta
    found = {
        "bound": cells.meter[row].to(torch.float64).nan_to_num(nan=1.0).masked_fill(wrong, 1.0),
        "floor": cells.floor[row].to(torch.float64).masked_fill(wrong, 0.0),
        "log_a": log_a,
        "risk": torch.expm1(2.0 * log_a) / 2.0,
        "out_bound_rel": torch.where(relative > 0, torch.nextafter(relative, relative.new_tensor(torch.inf)), 0.0),
        "radius": _unbounded(acc[:, AccField.M]),
        "heaviest_share": torch.where(eta == 0, 0.0, heaviest).nan_to_num(nan=1.0).clamp(0.0, 1.0),
    }
    status = torch.where(exact, STATUSES.index("exact"), STATUSES.index("measured"))
    read = {name: x.masked_fill(exact, torch.nan) for name, x in found.items()}
    form = cells.form[row].to(torch.float64).masked_fill(exact, torch.nan)
    return {**read, "status": status, "form": form}


def _unbounded(x: Tensor) -> Tensor:
    return x.to(torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
