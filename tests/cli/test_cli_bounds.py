import json
from pathlib import Path
from typing import Any

import pytest

from witcert_core.cli import main
from witcert_core.meter.bounds.vectors import check_vectors, load_vectors

VECTORS = Path(__file__).parents[1] / "data" / "bounds.json"
CASE = {"p_compressed": [0.5, 0.5], "radius": [0.1, 0.1], "sup_tv": 0.0498}


def check(tmp_path: Path, document: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    path = tmp_path / "vectors.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    code = main(["bounds", "check", str(path)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_suprema_of_this_repository_are_never_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bounds", "check", str(VECTORS)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    for form in ("eform", "tanh", "rms", "jensen", "needle", "extremal", "meter"):
        assert rows[form][1:3] == ["46", "0"]
    assert "1 of 46 cases have supremum 0" in out
    assert 1.0 <= float(rows["meter"][4]) < 1.1


def test_ratios_and_zero_suprema_are_told_apart() -> None:
    results = {result.name: result for result in check_vectors(load_vectors(VECTORS))}
    jensen, needle = results["jensen"], results["needle"]
    assert len(jensen.ratios) == 45
    assert min(jensen.ratios) >= 1.0
    assert jensen.quantile(0.5) <= jensen.quantile(0.95) <= max(jensen.ratios)
    assert jensen.at_zero is not None
    assert jensen.at_zero > 0.9
    assert needle.at_zero == 0.0
    assert results["eform"].vacuous > 10


def test_a_supremum_above_a_bound_is_a_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(tmp_path, {"cases": [CASE, CASE | {"sup_tv": 0.2}]}, capsys)
    assert code == 1
    assert "VIOLATED: jensen" in out
    assert "cases[1]" in out
    assert "cases[0]" not in out


def test_only_zero_suprema_have_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"p_compressed": [1.0], "radius": [3.0], "sup_tv": 0}
    code, out, _ = check(tmp_path, {"cases": [zero]}, capsys)
    assert code == 0
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["jensen"])
    assert row[4:6] == ["-", "-"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ([], '"cases"'),
        ({"cases": []}, '"cases"'),
        ({"cases": [3]}, "cases[0]: is int"),
        ({"cases": [CASE, {"radius": [1.0], "sup_tv": 0.1}]}, "cases[1].p_compressed: is None"),
        ({"cases": [CASE | {"p_compressed": ["a", 0.5]}]}, "p_compressed[0]: is 'a'"),
        ({"cases": [CASE | {"p_compressed": [True, 0.0]}]}, "p_compressed[0]: is True"),
        ({"cases": [CASE | {"radius": [0.1, -1.0]}]}, "radius[1]: is -1.0"),
        ({"cases": [CASE | {"radius": [0.1]}]}, "2 weights and 1 radii"),
        ({"cases": [CASE | {"p_compressed": [0.5, 0.4]}]}, "must sum to 1"),
        ({"cases": [CASE | {"sup_tv": 1.5}]}, "sup_tv: is 1.5"),
        ({"cases": [CASE | {"sup_tv": None}]}, "sup_tv: is None"),
        ('{"cases": [{"p_compressed": [1.0], "radius": [NaN], "sup_tv": 0}]}', "radius[0]: is nan"),
        ('{"cases": [{"p_compressed": [1.0], "radius": [Infinity], "sup_tv": 0}]}', "radius[0]: is inf"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: Any, message: str
) -> None:
    code, _, err = check(tmp_path, document, capsys)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_file_is_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bounds", "check", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
