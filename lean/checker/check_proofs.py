"""Check every proof of a Lean project: ``check_proofs.py [DIR]``; DIR is by default the folder above this one's.

A project is a library: a root file ``NAME.lean``, whose modules are under ``NAME/``, and ``theorems.txt``, the
theorems that are to hold, one full name a line, ``#`` begins a comment. It imports nothing but its own modules.

1. Every file is read for what it may say (:mod:`proof_source`).
2. Lean compiles every file: official Lean by ``lake build`` where ``lake`` is installed, else Lean from a wheel with a
   replacement of its core library (:mod:`lean_wheel`; Linux on x86-64).
3. The compiled files are read (:mod:`proof_olean`): every listed theorem exists and rests on no axiom beyond
   :data:`AXIOMS`; no definition bears a name of the core library, and no instance is about the core library alone.

Exit status: 0 if all of this was done and nothing is wrong, 1 if something is wrong, 2 if it could not be done.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import lean_wheel
import proof_olean
import proof_source

AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})


class Wrong(Exception):
    """The project does not pass; says why, a reason a line."""


class CannotCheck(Exception):
    """There is no Lean to check with; says what to do."""


def listed(project: Path) -> list[str]:
    """The theorems that are to hold."""
    lines = (project / "theorems.txt").read_text(encoding="utf-8").splitlines()
    names = [name for line in lines if (name := line.split("#")[0].strip())]
    if not names:
        raise Wrong("theorems.txt lists no theorem")
    if odd := [name for name in names if not re.fullmatch(r"[\w.']+", name)]:
        raise Wrong(f"theorems.txt: not a name: {odd[0]}")
    return names


def modules(project: Path) -> dict[str, Path]:
    """Every module of the library by name, after those it imports; the root file is the last.

    Raises:
        Wrong: if a file says what it may not, or imports anything but another file of the library.
    """
    roots = list(project.glob("*.lean"))
    if len(roots) != 1:
        raise Wrong(f"{project} has {len(roots)} files *.lean; expected one, the root of the library")
    (root,) = roots
    files = [root, *sorted((project / root.stem).glob("**/*.lean"))]
    paths = {".".join(path.relative_to(project).with_suffix("").parts): path for path in files}
    reasons: list[str] = []
    needs: dict[str, list[str]] = {}
    for module, path in paths.items():
        text = path.read_text(encoding="utf-8")
        found = list(proof_source.refusals(text))
        reasons += [f"{path.relative_to(project)}: {reason}" for reason in found]
        needs[module] = [] if found else proof_source.imports(proof_source.code_of(text))
        reasons += [
            f"{path.relative_to(project)}: imports {other}, which is no file of the library"
            for other in needs[module]
            if other not in paths
        ]
    if reasons:
        raise Wrong("\n".join(reasons))
    ordered: dict[str, Path] = {}

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            raise Wrong(f"modules import each other: {' -> '.join((*above, module))}")
        if module not in ordered:
            for other in needs[module]:
                visit(other, (*above, module))
            ordered[module] = paths[module]

    visit(root.stem, ())
    if unused := sorted(set(paths) - set(ordered)):
        raise Wrong(f"{root.name} does not import {', '.join(unused)}")
    return ordered


def compile_with_wheel(project: Path, build: Path, tell: Callable[[str], None]) -> list[proof_olean.Module]:
    """Compile the replacement core library, where ``build`` does not have it yet, then the project.

    Returns:
        The compiled modules of the core library.
    """
    order: list[Path] = []

    def visit(module: str) -> None:
        path = lean_wheel.CORE / Path(*module.split(".")).with_suffix(".lean")
        if path not in order:
            for other in proof_source.imports(path.read_text(encoding="utf-8")):
                visit(other)
            order.append(path)

    visit("Init")
    core = [build / path.relative_to(lean_wheel.CORE).with_suffix(".olean") for path in order]
    for path, compiled in zip(order, core, strict=True):
        if not compiled.is_file() and (said := lean_wheel.compile_file(path, root=lean_wheel.CORE, build=build)):
            raise CannotCheck(f"the replacement core library does not compile: {said}")
    for module, path in modules(project).items():
        if said := lean_wheel.compile_file(path, root=project, build=build):
            raise Wrong(f"{module}: {said}")
        tell(f"ok  {module}")
    return [proof_olean.read(path) for path in core]


def compile_with_lake(project: Path) -> Path:
    """Build with official Lean.

    Returns:
        The folder with the compiled modules.
    """
    done = subprocess.run(["lake", "build"], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Wrong(f"lake build: {done.stdout.decode(errors='replace').strip()}")
    return project / ".lake" / "build" / "lib" / "lean"


def axioms_by_lake(project: Path, names: Iterable[str], root: str) -> dict[str, frozenset[str]]:
    """The axioms of each theorem, as official Lean prints them; a theorem that it does not find is left out."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "Audit.lean"
        audit.write_text(f"import {root}\n" + "".join(f"#print axioms {name}\n" for name in names), encoding="utf-8")
        done = subprocess.run(
            ["lake", "env", "lean", audit], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    said = done.stdout.decode(errors="replace")
    found = re.findall(r"^'([^\n]+)' (?:does not depend on any axioms|depends on axioms: \[([^\]]*)\])$", said, re.M)
    return {name: frozenset(axiom.strip() for axiom in axioms.split(",") if axiom.strip()) for name, axioms in found}


def axioms_by_reading(names: Iterable[str], compiled: Iterable[proof_olean.Module]) -> dict[str, frozenset[str]]:
    """The axioms that each theorem rests on, through all it uses; a theorem that does not exist is left out."""
    constants = {name: constant for module in compiled for name, constant in module.constants.items()}
    found: dict[str, frozenset[str]] = {}
    for name in names:
        if name not in constants:
            continue
        seen, stack = {name}, [name]
        while stack:
            if stack[-1] not in constants:
                raise Wrong(f"{name} rests on {stack[-1]}, which no compiled file has")
            new = constants[stack.pop()].used - seen
            seen |= new
            stack += new
        found[name] = frozenset(other for other in seen if constants[other].kind == "axiom")
    return found


def misleading(project: Iterable[proof_olean.Module], core_names: Collection[str]) -> list[str]:
    """Why the text of a statement may not say what it seems to, a reason each.

    A definition called ``….Nat.le`` can stand where a reader takes ``Nat.le`` for the core library's; an instance that
    is about the core library alone can give another meaning to a sign or numeral of its types.
    """
    modules = list(project)
    own = {name: constant for module in modules for name, constant in module.constants.items()}
    reasons = []
    for name, constant in own.items():
        taken = [part for part in name.split(".")[1:] if part in core_names]
        if constant.kind != "theorem" and taken:
            reasons.append(f"{name} bears the core library's name {taken[0]}")
    for name in sorted({name for module in modules for name in module.instances}):
        if name in own and not own[name].in_type & own.keys():
            about = ", ".join(sorted(own[name].in_type))
            reasons.append(f"the instance {name} is about the core library alone: {about}")
    return reasons


def check(project: Path, build: Path, *, lake: bool, tell: Callable[[str], None] = print) -> str:
    """Check a project, with compiled files in ``build`` if Lean comes from the wheel.

    Returns:
        What was checked, in a sentence.

    Raises:
        Wrong: if the project does not pass.
        CannotCheck: if Lean cannot be run.
    """
    names = listed(project)
    library = modules(project)
    root = list(library)[-1]
    core: list[proof_olean.Module] = []
    if lake:
        build = compile_with_lake(project)
    elif reason := lean_wheel.missing():
        raise CannotCheck(
            f"{reason}.\nOr install official Lean, with `lake`, which is used where it is found: https://lean-lang.org/install"
        )
    else:
        core = compile_with_wheel(project, build, tell)
    compiled: list[proof_olean.Module] = []
    for module in library:
        path = build / Path(*module.split(".")).with_suffix(".olean")
        if not path.is_file():
            raise Wrong(f"{module} was not compiled: {path} is missing")
        compiled.append(proof_olean.read(path))
    rests_on = axioms_by_lake(project, names, root) if lake else axioms_by_reading(names, [*core, *compiled])
    own = {name: constant for module in compiled for name, constant in module.constants.items()}
    reasons = misleading(compiled, lean_wheel.core_names())
    for name in names:
        if name not in rests_on or name not in own:
            reasons.append(f"{name} is listed and does not exist")
        elif own[name].kind not in ("theorem", "def"):
            reasons.append(f"{name} is listed and is no theorem: {own[name].kind}")
        elif beyond := rests_on[name] - AXIOMS:
            reasons.append(f"{name} rests on {', '.join(sorted(beyond))}")
    reasons += [f"{name} is an axiom" for name, constant in own.items() if constant.kind in ("axiom", "opaque")]
    if reasons:
        raise Wrong("\n".join(reasons))
    by = (
        "official Lean (lake)"
        if lake
        else f"Lean {lean_wheel.LEAN} of {lean_wheel.REQUIREMENT}, with the replacement core library"
    )
    return f"{len(library)} files and {len(names)} listed theorems checked by {by}"


def main(words: list[str]) -> int:
    """The command line; see the module."""
    project = Path(words[0] if words else Path(__file__).parents[1]).resolve()
    if len(words) > 1 or not project.is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="witcert-lean-") as build:
            print(check(project, Path(build), lake=shutil.which("lake") is not None))
    except Wrong as wrong:
        print(f"REFUSED\n{wrong}", file=sys.stderr)
        return 1
    except CannotCheck as cannot:
        print(f"NOT CHECKED\n{cannot}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
