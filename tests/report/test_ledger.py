"""The ledger against plain counting, its records against their schemas, its sentences by the word."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from jsonschema import Draft202012Validator
from report_batches import batch, make_policy
from rich.console import Console

from witcert_core import CellEvent, RequestLedger, render_sentence, render_table
from witcert_core.errors import ReportError
from witcert_core.meter.bounds import FORM_NAMES
from witcert_core.policy.gates import CellStatus
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.report.jsonl import JsonlWriter, check_writable
from witcert_core.report.risk import HALF, estimate, of_last_layers
from witcert_core.report.schema import load_schema
from witcert_core.report.text import number_up, percent_down

NAN = math.nan
REQUEST = Draft202012Validator(load_schema("request"))
CELL = Draft202012Validator(load_schema("cell"))


@pytest.fixture
def waiting_quantizer(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a quantizer that keeps tokens exact for a while, in every way there is."""

    class Waiter(quantizer_registry().cls("int4_token_group")):  # type: ignore[misc]
        name: ClassVar[str] = "waiter"
        token_group: ClassVar[int] = 4
        recent_tokens: ClassVar[int] = 16
        calibration_tokens: ClassVar[int] = 8

    monkeypatch.setitem(quantizer_registry()._classes, "waiter", Waiter)
    return "waiter"


def ledger(layers: int = 2, heads: int = 2, **changes: Any) -> RequestLedger:
    policy = changes.pop("policy", None) or make_policy()
    return RequestLedger(policy, "sglang", layers, heads, **changes)


def valid(summary: dict[str, Any]) -> dict[str, Any]:
    REQUEST.validate(summary)
    return json.loads(json.dumps(summary, allow_nan=False))  # type: ignore[no-any-return]


def test_schemas_are_schemas() -> None:
    for validator in (REQUEST, CELL):
        Draft202012Validator.check_schema(validator.schema)


def test_counts_equal_plain_counting() -> None:
    """Random batches, some rows unknown, one layer excluded: against Python loops."""
    generator = torch.Generator().manual_seed(1)
    layers, heads, rows, tau = 4, 3, 40, 0.2
    book = ledger(layers, heads, layers_excluded={3: "too wide"}, head_offset=6)
    cells: list[tuple[float, int, int, int, str, float]] = []
    audited = violations = 0
    for step in range(1, rows + 1):
        for layer in range(3):
            meter = torch.rand(2, heads, generator=generator, dtype=torch.float64) ** 2
            form = torch.randint(0, len(FORM_NAMES), (2, heads), generator=generator)
            tv = meter * 1.2 * torch.rand(2, heads, generator=generator, dtype=torch.float64)
            tv[0, 0] = NAN
            row = step % 2
            made = batch(meter, form=form, tv=tv)
            book.observe("r", layer, step, 100 + step, made, row)
            for head in range(heads):
                value, true = float(meter[row, head]), float(tv[row, head])
                cells.append((value, layer, head + 6, step, FORM_NAMES[int(form[row, head])], true))
                audited += not math.isnan(true)
                violations += true > value
    book.count_unknown("r", 5, "stride")
    book.count_unknown("r", 2, "stride")
    book.count_unknown("r", 1, "warm prefix")
    s = valid(book.summary("r"))
    assert (s["rows_metered"], s["rows_seen"]) == (rows, rows + 8)
    assert s["cells_measured"] == len(cells) == rows * 3 * heads
    assert s["cells_measured"] + s["cells_unknown"] == s["rows_seen"] * layers * heads
    assert s["unknown_reasons"] == {
        "stride": 7 * layers * heads,
        "warm prefix": layers * heads,
        "layer excluded from metering": rows * heads,
    }
    assert s["tv_certified_cells"] == sum(cell[0] <= tau for cell in cells)
    assert s["tv_certified_share"] == s["tv_certified_cells"] / len(cells)
    top = max(cells)
    assert s["worst"] == dict(
        meter=top[0], layer=top[1], q_head=top[2], step=top[3], position=100 + top[3], form=top[4]
    )
    for layer in range(3):
        for head in range(heads):
            own = [c[0] for c in cells if c[1] == layer and c[2] == head + 6]
            assert s["worst_by_layer_head"][layer][head] == max(own)
        mine = [c for c in cells if c[1] == layer]
        assert s["by_layer"][layer] == dict(
            layer=layer,
            cells=len(mine),
            cells_exact=0,
            tv_certified_cells=sum(c[0] <= tau for c in mine),
            form=max(mine)[4],
        )
    assert s["worst_by_layer_head"][3] == [None] * heads
    assert s["by_layer"][3] == dict(layer=3, cells=0, cells_exact=0, tv_certified_cells=0, form=None)
    assert s["forms"] == {name: n for name in FORM_NAMES if (n := sum(c[4] == name for c in cells))}
    assert (s["audit"]["cells"], s["audit"]["violations"]) == (audited, violations)
    assert violations > 0
    trues = [(c[0], c[5]) for c in cells if not math.isnan(c[5])]
    assert s["audit"]["tv_max"] == max(true for _, true in trues)
    assert s["audit"]["gap_max"] == max(value - true for value, true in trues)
    assert s["audit"]["gap_mean"] == pytest.approx(sum(v - t for v, t in trues) / len(trues))


def test_nothing_measured_is_null_not_zero() -> None:
    for s in (ledger().summary("never seen"), ledger().finish("never seen", "abort")):
        valid(s)
        assert (s["tv_certified_share"], s["worst"], s["log_a_max"], s["out_bound_rel_max"]) == (None,) * 4
        assert s["worst_by_layer_head"] == [[None, None], [None, None]]
        assert "nothing was measured" in render_sentence(s)
        assert "is unknown" in render_sentence(s)


def test_not_a_number_is_no_bound() -> None:
    book = ledger(1)
    made = batch([[NAN, 0.1]], log_a=torch.tensor([NAN, 0.1]), out_bound=torch.tensor([0.1, NAN]))
    book.observe("r", 0, 1, 0, made, 0)
    s = valid(book.summary("r"))
    assert s["worst"]["meter"] == 1
    assert s["tv_certified_cells"] == 1
    assert (s["log_a_max"], s["out_bound_rel_max"]) == ("inf", "inf")
    assert "the bound says nothing about at least one cell" in render_sentence(s)


def test_an_output_that_does_not_match_voids_its_request_and_is_reported_with_its_place(tmp_path: Path) -> None:
    """Whatever the bounds said: they are about other weights than those that the engine attended with."""
    path = tmp_path / "cells.jsonl"
    policy = make_policy(report={"jsonl": str(path), "cells": "all"})
    book = ledger(2, policy=policy, jsonl=JsonlWriter(path), head_offset=8)
    book.observe("r", 0, 1, 5, batch([[0.05, 0.1]], tv=[[0.04, 0.04]], excess=[[-0.1, -0.2]]), 0)
    fine = valid(book.summary("r"))
    assert (fine["audit"]["outputs"], fine["audit"]["mismatches"], fine["audit"]["worst_mismatch"]) == (2, 0, None)
    assert (fine["tv_certified_share"], fine["out_unbounded_layers"]) == (1, [])
    assert "and all 2 outputs compared are attention over what is stored" in render_sentence(fine)
    made = batch([[0.05, 0.1]], tv=[[0.04, 0.2]], out_norm=2.0, floor=0.3, quantized=[[0, 3]], excess=[[0.5, NAN]])
    book.observe("r", 1, 1, 5, made, 0)
    s = valid(book.finish("r", "stop"))
    assert s["audit"]["worst_mismatch"] == {"excess": 0.25, "layer": 1, "q_head": 8, "step": 1, "position": 5}
    assert (s["audit"]["outputs"], s["audit"]["mismatches"]) == (3, 1)
    assert s["audit"]["violations"] == 2  # of the raw bounds: a mismatch hides no violation
    assert (s["tv_certified_cells"], s["tv_certified_share"]) == (0, 0.0)
    assert [layer["tv_certified_cells"] for layer in s["by_layer"]] == [0, 0]
    assert (s["cells_measured"], s["cells_exact"], s["worst"]["meter"]) == (4, 0, 1.0)
    assert (s["out_bound_rel_max"], s["out_unbounded_layers"]) == ("inf", [1])
    assert "nothing bounds an output of layer 1: " in render_sentence(s)
    assert s["claim"].startswith("nothing: outputs of the engine are not attention over what is stored")
    assert "THE ENGINE ATTENDS OTHERWISE in 1 of 3 audited outputs (layer 1, head 8, position 5)" in render_sentence(s)
    for record in lines(path)[:-1]:
        CELL.validate(record)
    (wrong,) = [record for record in lines(path)[:-1] if (record["out_excess"] or 0) > 0]
    assert (wrong["status"], wrong["meter"], wrong["floor"], wrong["out_bound"]) == ("measured", 1.0, 0.0, "inf")


def test_an_output_that_does_not_match_voids_the_deterministic_bounds_beside_it() -> None:
    book = ledger(1)
    made, beside = batch([[0.05, 0.1]], delta_loc=1e-3, excess=[[0.5, -1.0]]), batch([[0.1, 0.1]])
    book.observe("r", 0, 1, 5, made, 0, deterministic_cells=beside)
    assert valid(book.summary("r"))["deterministic_beside"] == {"cells": 1, "tv_certified_cells": 0, "worst": 0.1}


def test_certain_damage_is_counted_and_a_floor_above_the_truth_is_a_violation() -> None:
    book = ledger(1)
    made = batch([[0.9, 0.4]], floor=torch.tensor([[0.5, 0.1]]), tv=[[0.6, 0.05]])
    book.observe("r", 0, 1, 0, made, 0)
    s = valid(book.summary("r"))
    assert (s["damaged_cells"], s["floor_max"]) == (1, 0.5)
    assert (s["audit"]["cells"], s["audit"]["violations"]) == (2, 1)
    assert "1 are certainly damaged beyond it (by at least 0.5000 in the worst)" in render_sentence(s)


@pytest.mark.parametrize(
    ("bound", "norm", "relative"),
    [(0.0, 0.0, 0.0), (0.0, 2.0, 0.0), (1.0, 0.0, "inf"), (math.inf, 2.0, "inf"), (1.0, NAN, "inf")],
)
def test_relative_output_bound(bound: float, norm: float, relative: float | str) -> None:
    book = ledger(1)
    book.observe("r", 0, 1, 0, batch([[0.1, 0.1]], out_bound=bound, out_norm=norm), 0)
    assert valid(book.summary("r"))["out_bound_rel_max"] == relative


def test_relative_output_bound_rounds_up() -> None:
    book = ledger(1)
    book.observe("r", 0, 1, 0, batch([[0.1, 0.1]], out_bound=1.0, out_norm=3.0), 0)
    assert 1 / 3 < book.summary("r")["out_bound_rel_max"] < 1 / 3 + 1e-15


def test_tier_d_spends_its_budget_and_shows_tier_w_beside() -> None:
    book = ledger(2, policy=make_policy("int8_dither"))
    made, beside = batch([[0.1, 0.3]], delta_loc=1e-4), batch([[0.15, 0.5]])
    for layer in range(2):
        book.observe("r", layer, 1, 0, made, 0, deterministic_cells=beside)
    s = valid(book.summary("r"))
    assert s["delta"]["request"] == 0.01
    assert 4e-4 <= s["delta"]["spent"] < 4e-4 * (1 + 1e-12)
    assert s["deterministic_beside"] == {"cells": 4, "tv_certified_cells": 2, "worst": 0.5}
    assert s["tier_cells"] == {"probabilistic": 4}
    assert s["claim"] == (
        "probabilistic tier: probability >= 1-0.01, non-adaptive queries: "
        "texts fixed before the cached prefix was written; "
        "the deterministic tier (any query) beside it; "
        "local to a layer: nothing is claimed end to end"
    )
    book.observe("r", 0, 2, 1, batch([[0.1, 0.3]]), 0)
    claim = book.summary("r")["claim"]
    assert "2 cells beyond the declared rows have the deterministic tier alone" in claim


def test_a_request_without_the_law_counts_deterministic_cells_alone() -> None:
    """What was counted under the law before is unknown; later the deterministic cells count."""
    book = ledger(2, policy=make_policy("int8_dither"))
    made, beside = batch([[0.1, 0.3]], delta_loc=1e-4), batch([[0.15, 0.5]])
    for layer in range(2):
        book.observe("r", layer, 1, 0, made, 0, deterministic_cells=beside)
    book.claim_no_law("r", "because")
    assert book.claims_no_law("r")
    for layer in range(2):
        book.observe("r", layer, 2, 1, made, 0, deterministic_cells=beside if layer else None)
    s = valid(book.summary("r"))
    assert (s["tier"], s["deterministic_beside"], s["worst"]["meter"]) == ("deterministic", None, 0.5)
    assert s["tier_cells"] == {"deterministic": 2}
    assert (s["tv_certified_cells"], s["cells_measured"], s["cells_unknown"]) == (1, 2, 6)
    assert s["claim"] == (
        "deterministic tier: any query (no probabilistic tier for this request: because); "
        "local to a layer: nothing is claimed end to end"
    )


def test_tier_w_claims_no_probability() -> None:
    book = ledger(2)
    book.observe("r", 0, 1, 0, batch([[0.1, 0.3]]), 0)
    s = valid(book.summary("r"))
    assert s["claim"] == "deterministic tier: any query; local to a layer: nothing is claimed end to end"
    assert (s["delta"], s["deterministic_beside"]) == ({"request": 0.0, "spent": 0.0}, None)


def test_a_row_measured_in_some_layers_only_is_partly_unknown() -> None:
    book = ledger(3, layers_exempt={2: "no attention"})
    book.observe("r", 0, 1, 0, batch([[0.1, 0.1]]), 0)
    s = valid(book.summary("r"))
    assert (s["cells_measured"], s["cells_unknown"]) == (2, 2)
    assert s["unknown_reasons"] == {"row measured in some layers only": 2}
    assert s["layers_excluded"] == {"2": "no attention"}


def test_gate_verdicts_are_told_apart() -> None:
    book = ledger(1, policy=make_policy(gate={"kind": "combined"}))
    book.observe("r", 0, 1, 0, batch([[0.1, 0.3]]), 0)
    c, r, n = CellStatus.WITHIN_TARGET, CellStatus.RANKED, CellStatus.ABOVE_TARGET
    book.count_verdict("r", torch.tensor([[c, c], [r, n]]))
    book.count_repair("r", 3, 4096)
    book.count_repair("r", 1, 1024)
    s = valid(book.summary("r"))
    assert s["gate"] == dict(
        kind="combined",
        target="both",
        repaired_blocks=4,
        bytes=5120,
        within_target=2,
        above_target=1,
        ranked=1,
        exact=0,
    )
    sentence = render_sentence(s)
    assert "(target: weights and output) restored 4 blocks (5120 bytes): 2 cells within its target" in sentence
    assert "1 saturated cells brought down by rank, which promises nothing" in sentence
    assert "1 cells left ABOVE its target" in sentence


def test_finishing_forgets_and_reports() -> None:
    reported: list[dict[str, Any]] = []
    book = ledger(1, on_report=(reported.append,))
    book.observe("r", 0, 1, 0, batch([[0.1, 0.3]]), 0)
    book.observe("other", 0, 1, 0, batch([[0.9, 0.9]]), 0)
    s = book.finish("r", "stop")
    assert reported == [s]
    assert (s["finish_reason"], s["worst"]["meter"]) == ("stop", 0.3)
    assert book.summary("r")["cells_measured"] == 0
    assert book.summary("other")["worst"]["meter"] == 0.9
    book.forget("other")
    assert book.summary("other")["cells_measured"] == 0


def test_a_long_request_costs_no_more_memory_than_a_short_one() -> None:
    book = ledger(2)
    made = batch([[0.1, 0.3]])

    def size() -> int:
        state = vars(book._requests["r"])
        tensors = sum(t.numel() for t in state.values() if isinstance(t, torch.Tensor))
        return tensors + sum(len(v) for v in state.values() if hasattr(v, "__len__"))

    book.observe("r", 0, 1, 0, made, 0)
    before = size()
    for step in range(2, 500):
        book.observe("r", 0, step, step, made, 0)
    assert size() == before


@pytest.mark.parametrize(
    ("layer", "meter", "message"),
    [
        (2, [[0.1, 0.1]], "layer 2 is not one of the 2 layers"),
        (0, [[0.1]], "the batch has 1 query heads, the ledger 2"),
    ],
)
def test_cells_of_another_model_are_refused(layer: int, meter: list[list[float]], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        ledger().observe("r", layer, 1, 0, batch(meter), 0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("cells", "written"), [("none", []), ("worst", [1]), ("all", [0, 1])])
def test_cell_records(cells: str, written: list[int], tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    policy = make_policy(report={"jsonl": str(path), "cells": cells})
    book = ledger(1, policy=policy, jsonl=JsonlWriter(path), head_offset=8)
    made = batch(
        [[0.9, 0.9], [0.1, 0.3]], tv=[[NAN, NAN], [NAN, 0.05]], log_a=math.inf, excess=[[NAN, NAN], [NAN, -0.25]]
    )
    book.observe("r", 0, 4, 17, made, 1, repaired_blocks=2)
    book.count_unknown("r", 3, "stride")
    book.finish("r", "stop")
    *records, summary = lines(path)
    valid(summary)
    for record in records:
        CELL.validate(record)
    measured = [record for record in records if record["status"] == "measured"]
    assert [record["q_head"] for record in measured] == [8 + head for head in written]
    if measured:
        assert measured[-1] == {
            "schema": "witcert.cell/1",
            "request_id": "r",
            "step": 4,
            "position": 17,
            "layer": 0,
            "q_head": 9,
            "tier": "deterministic",
            "meter": 0.3,
            "floor": 0.0,
            "form": "jensen",
            "log_a": "inf",
            "m": 0.75,
            "tv_audit": 0.05,
            "out_excess": -0.25,
            "out_bound": 0.25,
            "s": 9,
            "s_quantized": 7,
            "repaired_blocks": 2,
            "status": "measured",
        }
        assert records[-1]["status"] == "unknown"
        assert (records[-1]["meter"], records[-1]["rows"], records[-1]["reason"]) == (None, 3, "stride")


def test_schema_refuses_an_unknown_cell_with_a_value() -> None:
    record: dict[str, Any] = dict.fromkeys(load_schema("cell")["required"])
    record |= {"schema": "witcert.cell/1", "request_id": "r", "repaired_blocks": 0, "status": "unknown"}
    record |= {"rows": 1, "reason": "stride"}
    assert CELL.is_valid(record)
    assert not CELL.is_valid(record | {"meter": 0.0})
    assert not CELL.is_valid({key: value for key, value in record.items() if key != "reason"})


def test_observers_get_rows_with_all_their_heads() -> None:
    seen: list[CellEvent] = []
    book = ledger(2, on_cell=(seen.append,))
    made = batch([[0.1, 0.3], [0.2, 0.4]], delta_loc=1e-3)
    book.observe("r", 1, 7, 30, made, 1)
    (event,) = seen
    assert (event.request_id, event.layer, event.step, event.position, event.row) == ("r", 1, 7, 30, 1)
    assert event.tier == "probabilistic"
    assert event.cells is made


def test_jsonl_appends_and_counts_losses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log-{pid}.jsonl"
    first = JsonlWriter(path)
    first.write({"a": 1})
    JsonlWriter(path).write({"b": 2})
    assert lines(first.path) == [{"a": 1}, {"b": 2}]
    assert "{pid}" not in first.path.name
    with pytest.raises(ValueError, match="not JSON compliant"):
        first.write({"a": math.inf})
    full = JsonlWriter("/dev/full")
    for _ in range(3):
        full.write({"a": 1})
    assert full.dropped == 3
    assert len([r for r in caplog.records if "was lost" in r.message]) == 1
    book = ledger(jsonl=full)
    assert book.summary("r")["records_dropped"] == 3


def test_a_torn_line_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonlWriter(tmp_path / "log.jsonl")
    write = os.write
    writer.write({"a": 1})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
        writer.write({"lost": "in the middle"})
    writer.write({"b": 2})
    first, _, last = writer.path.read_text().splitlines()
    assert (json.loads(first), json.loads(last), writer.dropped) == ({"a": 1}, {"b": 2}, 1)


def test_a_check_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "of-{pid}.jsonl"))
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / f"of-{os.getpid()}.jsonl"
    kept.write_text("{}\n")
    check_writable(str(tmp_path / "of-{pid}.jsonl"))
    check_writable(str(tmp_path / "shared.jsonl"))
    assert kept.read_text() == "{}\n"
    assert (tmp_path / "shared.jsonl").exists()  # another process may have opened it since
    with pytest.raises(ReportError, match="such"):
        check_writable(str(tmp_path / "no" / "such.jsonl"))


def test_jsonl_path_is_checked_at_start(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.jsonl: .*/no/such\.jsonl cannot be opened for appending: No such"):
        JsonlWriter(tmp_path / "no" / "such.jsonl")


def sentence(meter: list[list[float]], unknown: int = 0, **changes: Any) -> str:
    book = ledger(1)
    book.observe("r7", 0, 1, 41, batch(meter, **changes), 0)
    book.count_unknown("r7", unknown, "stride")
    return render_sentence(book.finish("r7", "stop"))


def test_sentence_says_what_was_seen_and_what_not() -> None:
    assert sentence([[0.12341, 0.5]], unknown=31) == (
        "request r7 (int4_token_group on sglang): compression moved the attention weights of a measured cell "
        "by at most 0.5000 total variation (layer 0, head 1, position 41, by jensen); "
        "2 of 64 cells were measured, the other 62 are unknown (stride: 62); 50 % of the measured ones have "
        f"their weights certified at tau 0.2; risk {estimate(0.5):.2f} (an estimate of how likely compression changed "
        "the text, not a bound); deterministic tier: any query; local to a layer: nothing is claimed end to end"
    )


def test_the_risk_is_the_curve_of_the_mean_of_what_was_measured() -> None:
    book = ledger(1)
    assert valid(book.summary("r"))["risk"] is None
    book.observe("r", 0, 1, 5, batch([[0.0, 0.0]], quantized=[[0, 0]], log_a=9.0), 0)
    assert valid(book.summary("r"))["risk"] == 0.0
    book.observe("r", 0, 2, 6, batch([[0.9, 0.03]], quantized=[[0, 4]], log_a=1.0), 0)
    book.observe("r", 0, 3, 7, batch([[0.9, 0.03]], quantized=[[3, 4]], log_a=4.0), 0)
    assert valid(book.summary("r"))["risk"] == pytest.approx(estimate((1.0 + 4.0 + 4.0) / 3))
    book.observe("r", 0, 4, 8, batch([[1.0, 1.0]], log_a=math.inf), 0)
    assert 0.99 < valid(book.summary("r"))["risk"] <= 1.0
    rising = [estimate(10.0**power) for power in range(-4, 7)]
    assert estimate(0.0) == 0.0
    assert rising == sorted(set(rising))
    assert estimate(HALF) == 0.5


def test_the_risk_looks_at_the_last_third_of_the_layers_each_counting_the_same() -> None:
    book = ledger(6)
    for layer, log_a in enumerate((50.0, 40.0, 30.0, 20.0, 1.0, 4.0)):
        for step in range(1, 2 + (layer == 5)):
            book.observe("r", layer, step, 5, batch([[0.1, 0.1]], log_a=log_a), 0)
    assert valid(book.summary("r"))["risk"] == pytest.approx(estimate(2.5))
    assert of_last_layers([8.0, 0.0, 6.0, 0.0], [4, 0, 2, 0]) == 3.0  # behind the last layer that was measured: nothing
    assert of_last_layers([8.0], [4]) == 2.0


def test_cells_that_read_nothing_quantized_are_exact_and_never_certified(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    policy = make_policy(report={"jsonl": str(path), "cells": "all"})
    book = ledger(1, policy=policy, jsonl=JsonlWriter(path))
    book.observe("r", 0, 1, 5, batch([[0.01, 0.02]], quantized=[[0, 0]], log_a=9.0, tv=[[0.0, 0.0]]), 0)
    s = valid(book.summary("r"))
    assert (s["cells_measured"], s["cells_exact"], s["cells_unknown"]) == (0, 2, 0)
    assert (s["tv_certified_cells"], s["tv_certified_share"], s["worst"]) == (0, None, None)
    assert (s["floor_max"], s["log_a_max"], s["out_bound_rel_max"], s["forms"]) == (None, None, None, {})
    assert s["tokens_read"] == {"quantized": 0, "exact": 18}
    assert s["worst_by_layer_head"] == [["exact", "exact"]]
    assert s["audit"]["cells"] == 2  # that a cell is exact is audited like a bound
    book.observe("r", 0, 2, 6, batch([[0.9, 0.03]], quantized=[[0, 4]], log_a=9.0), 0)
    s = valid(book.finish("r", "stop"))
    assert (s["cells_measured"], s["cells_exact"], s["tv_certified_share"]) == (1, 3, 1.0)
    assert s["worst_by_layer_head"] == [["exact", 0.03]]
    assert s["by_layer"] == [dict(layer=0, cells=1, cells_exact=3, tv_certified_cells=1, form="jensen")]
    assert s["worst"]["meter"] == 0.03  # of the head that read something, whatever the other one's bound
    records = [record for record in lines(path) if record["schema"] == "witcert.cell/1"]
    for record in records:
        CELL.validate(record)
    assert [(r["status"], r["s_quantized"]) for r in records] == [("exact", 0)] * 3 + [("measured", 4)]


def test_a_dithered_row_of_exact_cells_has_nothing_beside_it() -> None:
    book = ledger(1, policy=make_policy("int8_dither"))
    made = batch([[0.01, 0.02]], quantized=[[0, 0]], delta_loc=1e-4)
    book.observe("r", 0, 1, 5, made, 0, deterministic_cells=made)
    s = valid(book.finish("r", "stop"))
    assert s["deterministic_beside"] is None
    assert s["delta"]["spent"] > 0  # was set aside for these cells all the same


def test_the_worst_record_of_a_row_is_of_a_cell_that_read_something_quantized(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    policy = make_policy(report={"jsonl": str(path), "cells": "worst"})
    book = ledger(1, policy=policy, jsonl=JsonlWriter(path))
    book.observe("r", 0, 1, 5, batch([[0.9, 0.1]], quantized=[[0, 3]]), 0)
    assert [record["q_head"] for record in lines(path)] == [1]


def test_the_text_says_what_a_quantizer_waits_for(waiting_quantizer: str) -> None:
    book = ledger(1, policy=make_policy(waiting_quantizer))
    book.observe("r7", 0, 1, 5, batch([[0.01, 0.02]], quantized=[[0, 0]]), 0)
    waits = "calibrates on the first 8 tokens, closes groups of 4 tokens and keeps the newest 16 exact"
    s = book.summary("r7")
    assert s["waits_for"] == waits
    assert (
        f"nothing quantized was read yet: {waiting_quantizer} {waits}; 0 of 2 cells were measured, 2 read nothing "
        "quantized, so there is nothing to certify; deterministic tier" in render_sentence(s)
    )
    book.observe("r7", 0, 2, 60, batch([[0.1, 0.1]]), 0)
    text = render_sentence(book.finish("r7", "stop"))
    assert f"2 of 4 cells were measured, 2 read nothing quantized ({waiting_quantizer} {waits}); 100 % of" in text


def test_the_table_marks_exact_cells(waiting_quantizer: str) -> None:
    book = ledger(2, policy=make_policy(waiting_quantizer))
    book.observe("r7", 0, 1, 5, batch([[0.01, 0.02]], quantized=[[0, 0]]), 0)
    console = Console(width=120, record=True, file=StringIO())
    console.print(render_table(book.finish("r7", "stop")))
    text = console.export_text()
    assert re.search(r"0 += += +– +–", text)
    assert re.search(r"1 +\? +\? +\? +\?", text)
    assert "= read nothing quantized, hence exact; 2 cells in all" in " ".join(text.split())


def test_sentence_leads_with_a_violation() -> None:
    text = sentence([[0.1, 0.1]], tv=[[0.2, 0.05]])
    assert "request r7 (int4_token_group on sglang): BOUND VIOLATED in 1 of 2 audited cells, do not trust this" in text
    assert "none of 2 audited cells exceeded its bound (largest true value 0.0500)" in sentence(
        [[0.1, 0.1]], tv=[[0.02, 0.05]]
    )


def test_display_rounds_against_us() -> None:
    assert number_up(0.12001) == "0.13"
    assert number_up(0.0) == "0.00"
    assert percent_down(0.99999) == "99.9 %"
    assert percent_down(1.0) == "100 %"


def table_text(book: RequestLedger) -> str:
    console = Console(width=120, record=True, file=StringIO(), force_terminal=True)
    console.print(render_table(book.summary("r")))
    return console.export_text(styles=True)


def test_table_shows_unknown_as_unknown_and_colours_by_tau() -> None:
    book = ledger(2, layers_excluded={1: "sliding window"})
    book.observe("r", 0, 1, 0, batch([[0.151, 0.5]]), 0)
    text = table_text(book)
    assert "\x1b[32m .16" in text or "\x1b[32m.16" in text
    assert "\x1b[33m" in text
    assert "\x1b[31m" not in text
    plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))
    rows = [line.split() for line in plain.splitlines()]
    assert ["0", ".16", ".50", "50", "%", "jensen"] in rows
    assert ["1", "?", "?", "?", "?"] in rows
    assert "layer 1: sliding window" in plain
    book.observe("r", 0, 2, 1, batch([[1.0, 0.5]]), 0)
    assert "\x1b[31m1.00" in table_text(book)


def test_reports_do_not_import_the_prometheus_client() -> None:
    """prometheus_client fixes its mode on import; the engine must be the one to choose when."""
    import subprocess

    code = "import sys, witcert_core.report.prometheus; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
