"""The checker of the proofs refuses what does not hold, what is assumed, and what could make a statement mislead."""

from __future__ import annotations

from pathlib import Path

import check_proofs
import lean_wheel
import proof_olean
import proof_source
import pytest

needs_lean = pytest.mark.skipif(bool(lean_wheel.missing()), reason=lean_wheel.missing() or "Lean is there")
LEAN = Path(__file__).resolve().parents[2] / "lean"

HONEST = """
/-! A /- nested -/ comment. -/
namespace Toy
/-- Twice a number. -/
def twice (n : Nat) : Nat := n + n
theorem twice_zero : twice 0 = 0 := rfl -- `sorry` in a comment is nothing
theorem swap (m n : Nat) : m + n = n + m := by rw [Nat.add_comm]
end Toy
"""


def project_of(folder: Path, text: str, theorems: str = "Toy.twice_zero\nToy.swap\n") -> Path:
    """A project with one module, whose text is given."""
    (folder / "Toy").mkdir(parents=True)
    (folder / "Toy.lean").write_text("import Toy.Basic\n")
    (folder / "Toy" / "Basic.lean").write_text(text)
    (folder / "theorems.txt").write_text(theorems)
    return folder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the replacement core library is compiled once."""
    return tmp_path_factory.mktemp("lean-build")


def check(project: Path, build: Path) -> str:
    return check_proofs.check(project, build, lake=False, tell=lambda line: None)


@pytest.mark.parametrize("path", sorted(LEAN.glob("WitCert*/**/*.lean")), ids=lambda path: path.stem)
def test_our_proofs_say_nothing_that_is_refused(path: Path) -> None:
    assert not list(proof_source.refusals(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("axiom cheat : False", "axiom"),
        ("theorem t : False := sorry", "sorry"),
        ("theorem t : False := by admit", "admit"),
        ("def x := 1.axiom cheat : False", "axiom"),
        ("unsafe def f : Nat := 0", "unsafe"),
        ("theorem t : 1 = 2 := by native_decide", "native_decide"),
        ("@[implemented_by g] def f : Nat := 0", "implemented_by"),
        ("@[simp] theorem t : True := True.intro", "attribute 'simp'"),
        ("@[\nsimp] theorem t : True := True.intro", "attribute"),
        ("set_option debug.skipKernelTC true", "debug.skipKernelTC"),
        ("set_option\n  debug.skipKernelTC true", "option"),
        ("set_option «debug».skipKernelTC true", "«"),
        ("theorem t : True := by set_option debug.skipKernelTC true in trivial", "debug.skipKernelTC"),
        ('notation a " ≤ " b => True', "notation"),
        ('local infix:50 " ≤ " => f', "infix"),
        ('syntax "x" : term', "syntax"),
        ("macro_rules | `(theorem $n : $t := $v) => `(theorem $n : True := True.intro)", "macro_rules"),
        ('macro "#print" "axioms" n:ident : command => `(#eval 0)', "macro"),
        ('macro "always" : term => `(True)', "macro"),
        ('macro "close" t:term : tactic => `(tactic| exact $t)', "macro"),
        ("#eval 0", "#"),
        ("run_cmd skip", "run_cmd"),
        ("instance : Inhabited Nat := ⟨0⟩  theorem hidden : False := h", "does not begin its line"),
        ("theorem t : True := True.intro  variable (h : False)", "does not begin its line"),
        ("  open Nat renaming le → lt", "renaming"),
        ("alias a := b", "'alias' begins a line"),
        ("import Lean.Elab\nimport Toy.Other", ""),
        ("public import Lean", "'public' begins a line"),
        ("theorem t : True := True.intro /--/ axiom cheat : False /- -/", "after the comment's first sign"),
        ('def s := "/-"\naxiom cheat : False\ndef r := "-/"', "before the comment"),
        ("def s := x<--y\n", "before the comment"),
        ("theorem t : True := True.intro -/", "closes no comment"),
        ("/- theorem t : True := True.intro", "not closed"),
    ],
)
def test_text_that_could_mislead_is_refused(line: str, reason: str) -> None:
    found = list(proof_source.refusals(f"namespace Toy\n{line}\nend Toy\n"))
    assert any(reason in what for what in found) == bool(reason), found


def test_comments_are_blanked_where_they_stand() -> None:
    code = proof_source.code_of("/- a /- b -/\nc -/ theorem -- d\nend")
    assert code == "            \n     theorem     \nend"


@needs_lean
def test_an_honest_project_is_checked(tmp_path: Path, build: Path) -> None:
    assert "2 files and 2 listed theorems checked" in check(project_of(tmp_path / "honest", HONEST), build)


@needs_lean
@pytest.mark.parametrize(
    ("added", "theorems", "reason"),
    [
        ("theorem t : twice 1 = 3 := rfl", "Toy.t", "Toy.Basic"),
        ("theorem t : twice 1 = 3 := by rw [twice]", "Toy.t", "Toy.Basic"),
        ("theorem t : False := t", "Toy.t", "Toy.Basic"),
        ("def five := 5", "Toy.six", "does not exist"),
        (
            "def Nat.succ (n : Nat) : Nat := n\ntheorem t : Nat.succ 1 = 1 := rfl",
            "Toy.t",
            "core library's name Nat",
        ),
        (
            "instance : LE Nat := ⟨fun _ _ => True⟩\ntheorem t : 2 ≤ 1 := True.intro",
            "Toy.t",
            "about the core library alone",
        ),
        ("instance : OfNat Nat 7 := ⟨8⟩\ntheorem t : True := True.intro", "Toy.t", "about the core library alone"),
        ("theorem Toy.Nat.add_zero : True := True.intro", "Toy.swap", ""),
    ],
    ids=[
        "false",
        "false by a tactic",
        "circular",
        "missing",
        "a name of core",
        "an order",
        "a numeral",
        "a theorem's name",
    ],
)
def test_what_does_not_hold_or_misleads_is_refused(
    tmp_path: Path, build: Path, added: str, theorems: str, reason: str
) -> None:
    project = project_of(tmp_path / "project", HONEST.replace("end Toy", f"{added}\nend Toy"), theorems)
    if not reason:
        check(project, build)
        return
    with pytest.raises(check_proofs.Wrong, match=reason):
        check(project, build)


@needs_lean
def test_axioms_are_found_through_what_a_theorem_uses(tmp_path: Path, build: Path) -> None:
    check(project_of(tmp_path / "honest", HONEST), build)  # compiles the core library
    source = tmp_path / "Cheat.lean"
    source.write_text(
        "axiom cheat : 1 = 2\nstructure Box where\n  n : Nat\n  h : n = 2\n"
        "def box : Box := ⟨1, cheat⟩\ntheorem far : box.n = 2 := box.h\ntheorem near (f g : Nat → Nat)"
        " (h : ∀ n, f n = g n) : f = g := funext h\n"
    )
    assert lean_wheel.compile_file(source, root=tmp_path, build=build) == ""
    core = [proof_olean.read(path) for path in (build / "Core").glob("*.olean")]
    found = check_proofs.axioms_by_reading(["far", "near", "none"], [*core, proof_olean.read(build / "Cheat.olean")])
    assert found == {"far": {"cheat"}, "near": {"Quot.sound"}}


@needs_lean
def test_a_proof_left_open_does_not_compile(tmp_path: Path, build: Path) -> None:
    check(project_of(tmp_path / "honest", HONEST), build)
    source = tmp_path / "Open.lean"
    source.write_text("theorem open_end : 1 = 2 := sorry\n")
    assert "error" in lean_wheel.compile_file(source, root=tmp_path, build=build)


def test_a_file_that_is_not_imported_is_refused(tmp_path: Path) -> None:
    project = project_of(tmp_path / "project", HONEST)
    (project / "Toy" / "Forgotten.lean").write_text("theorem t : True := True.intro\n")
    with pytest.raises(check_proofs.Wrong, match=r"does not import Toy\.Forgotten"):
        check_proofs.modules(project)


def test_a_foreign_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(check_proofs.Wrong, match=r"imports Lean\.Elab"):
        check_proofs.modules(project_of(tmp_path / "project", f"import Lean.Elab\n{HONEST}"))


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(check_proofs.Wrong, match="lists no theorem"):
        check_proofs.listed(project_of(tmp_path / "project", HONEST, "# nothing\n"))


def test_without_lean_nothing_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lean_wheel, "missing", lambda: "there is no Lean")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_proofs.main([str(project_of(tmp_path / "project", HONEST))]) == 2
    assert "NOT CHECKED\nthere is no Lean" in capsys.readouterr().err


def test_a_lake_that_builds_nothing_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "lake"
    lake.write_text("#!/bin/sh\nexit 0\n")
    lake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert check_proofs.main([str(project_of(tmp_path / "project", HONEST))]) == 1
    assert "was not compiled" in capsys.readouterr().err
