"""The answers of probes against plain counting of the same cells."""

from __future__ import annotations

import json
import math

import pytest
import torch
from report_batches import batch

from witcert_core.meter.cells import CellBatch
from witcert_core.probes.answers import MAX_GROUPS, power_of_two
from witcert_core.probes.board import MAX_ENDED, ProbeBoard

METERS = [[0.1, 0.3, 0.7], [0.0, 0.5, 0.9]]
"""By layer and head."""


def asked(*texts: str, heads: int = 3) -> ProbeBoard:
    board = ProbeBoard(heads)
    for text in texts:
        board.command({"do": "enable", "id": text, "text": text})
    return board


def see(board: ProbeBoard, *names: str, request: str = "r", step: int = 1) -> None:
    layers = {layer: (batch([row]), 0) for layer, row in enumerate(METERS)}
    board.observe(names, {"request": request, "position": 8 + step, "step": step}, layers, {})


def test_counts_maxima_and_powers_of_two() -> None:
    texts = "count()", "max(bound) by layer", "quantize(bound)", "count() by head where bound >= 0.5"
    board = asked(*texts)
    see(board, *texts)
    see(board, "count()", request="other")
    count, largest, buckets, high = board.shown()
    assert (count["rows"], count["cells"], count["groups"]) == (
        2,
        {"measured": 12, "exact": 0},
        [{"by": {}, "cells": 12}],
    )
    assert largest["groups"] == [
        {"by": {"layer": 1}, "cells": 3, "max": 0.9},
        {"by": {"layer": 0}, "cells": 3, "max": 0.7},
    ]
    assert buckets["groups"][0]["buckets"] == {"0": 1, "2^-4": 1, "2^-2": 1, "2^-1": 3}
    assert {group["by"]["head"]: group["cells"] for group in high["groups"]} == {2: 2, 1: 1}
    json.dumps(board.shown(), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, "0"), (0.5, "2^-1"), (0.75, "2^-1"), (1.0, "2^0"), (3.9, "2^1"), (math.inf, "inf")]
)
def test_the_bucket_of_a_value(value: float, bucket: str) -> None:
    assert power_of_two(value) == bucket


def test_the_highest_cells_with_their_places_and_the_highest_groups() -> None:
    board = asked("top(2, bound)", "top(1, bound) by request")
    for step, request in enumerate(("a", "b"), 1):
        see(board, "top(2, bound)", request=request, step=step)
    see(board, "top(1, bound) by request", request="b")
    cells, groups = board.shown()
    assert [(cell["value"], cell["request"], cell["layer"], cell["head"]) for cell in cells["top"]] == [
        (0.9, "a", 1, 2),
        (0.9, "b", 1, 2),
    ]
    assert cells["top"][1] == {
        "value": 0.9,
        "request": "b",
        "layer": 1,
        "head": 2,
        "step": 2,
        "position": 10,
        "form": "jensen",
    }
    assert groups["groups"] == [{"by": {"request": "b"}, "cells": 6, "max": 0.9}]


def row(board: ProbeBoard, name: str, cells: CellBatch, unknown: dict[int, str] | None = None) -> None:
    board.observe([name], {"request": "r", "position": 1, "step": 1}, {0: (cells, 0)}, unknown or {})


def test_exact_cells_are_neither_within_a_bound_nor_above_it() -> None:
    texts = "count() where bound <= 1", "count() where not bound > 0.2", "count() by status where status != unknown"
    board = asked(*texts)
    for text in texts:
        row(board, text, batch([[0.1, 0.0, 0.4]], quantized=[[7, 0, 7]]))
    below, negated, by_status = board.shown()
    assert below["cells"] == {"measured": 2, "exact": 0}
    assert negated["cells"] == {"measured": 1, "exact": 0}
    assert {group["by"]["status"]: group["cells"] for group in by_status["groups"]} == {"measured": 2, "exact": 1}


def test_unknown_cells_stay_unknown_unless_they_cannot_match() -> None:
    texts = "count() where bound > 0.2", "count() where layer == 0", "count() where status == unknown and layer == 5"
    board = asked(*texts)
    for text in texts:
        row(board, text, batch([[0.1, 0.3, 0.4]]), unknown={5: "graph"})
    above, other_layer, asked_for = board.shown()
    assert (above["cells"]["measured"], above["unknown"]) == (2, {"graph": 3})
    assert (other_layer["cells"]["measured"], other_layer["unknown"]) == (3, {"graph": 0})
    assert asked_for["groups"] == [{"by": {}, "cells": 3}]


def test_a_cell_of_other_outputs_bounds_nothing() -> None:
    board = asked("max(bound)", "max(out_bound_rel)")
    cells = batch([[0.1, 0.2, 0.3]], excess=[[math.nan, 0.5, -1.0]])
    for text in ("max(bound)", "max(out_bound_rel)"):
        row(board, text, cells)
    bound, out = board.shown()
    assert bound["groups"][0]["max"] == 1.0
    assert out["groups"][0]["max"] == "inf"


def test_no_measure_of_a_broken_cell_is_a_small_one() -> None:
    nan = torch.full((1, 3), math.nan, dtype=torch.float64)
    cells = batch(nan, log_a=nan, out_bound=nan)
    texts = [f"max({name})" for name in ("bound", "log_a", "risk", "out_bound_rel")]
    board = asked(*texts)
    for text in texts:
        row(board, text, cells)
    assert [answer["groups"][0]["max"] for answer in board.shown()] == [1.0, "inf", "inf", "inf"]


def test_answers_are_of_bounded_size() -> None:
    text = "count() by request"
    board = asked(text)
    for number in range(MAX_GROUPS + 2):
        see(board, text, request=f"r{number}")
    (answer,) = board.shown()
    assert len(answer["groups"]) == MAX_GROUPS
    assert answer["groups_left_out_cells"] == 12
    for number in range(MAX_ENDED + 3):
        board.command({"do": "enable", "id": f"p{number}", "text": "count()"})
        board.command({"do": "end", "id": f"p{number}", "text": "told to"})
    assert [answer["id"] for answer in board.shown()] == [text, *(f"p{number}" for number in range(3, MAX_ENDED + 3))]
    board.command({"do": "forget", "id": text, "text": ""})
    assert text not in [answer["id"] for answer in board.shown()]
