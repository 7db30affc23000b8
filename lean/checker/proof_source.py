"""What a proof file may say.

A reader trusts a listed theorem by its text. So the text must mean what it seems to: a project may state and prove,
but may not change how Lean reads it (notation, macros of terms or commands, attributes), switch checks off (options),
or assume anything (axioms). The rules hold before Lean runs and whichever Lean runs; they are stricter than needed,
so that they need no knowledge of Lean's grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COMMANDS = """
class def end example export import include inductive instance macro namespace noncomputable omit open section
set_option structure theorem universe variable where
"""
COMMANDS = frozenset(_COMMANDS.split())
"""What a line that is not indented may begin with; ``where`` continues a declaration."""

OPTIONS = (
    "linter.unusedSimpArgs",
    "maxHeartbeats",
    "maxRecDepth",
    "synthInstance.maxHeartbeats",
    "synthInstance.maxSize",
)
ATTRIBUTES = ("elab_as_elim",)

_ASSUMES = "admit axiom lcProof native_decide opaque partial sorry sorryAx unsafe"
_RUNS_OTHER_CODE = """
builtin_initialize by_elab csimp extern implemented_by include_str init initialize reduceBool run_cmd run_elab
run_meta run_tac
"""
_CHANGES_READING = """
attribute binder_predicate builtin_dsimproc builtin_simproc declare_syntax_cat deriving dsimproc dsimproc_decl elab
elab_rules infix infixl infixr init_quot local macro_rules notation notation3 postfix prefix prelude private
register_builtin_option register_option register_simp_attr renaming scoped simproc simproc_decl syntax unif_hint
"""
FORBIDDEN = frozenset(f"{_ASSUMES} {_RUNS_OTHER_CODE} {_CHANGES_READING}".split())
"""Words that code may not contain, wherever they stand."""

TACTIC_ABBREVIATION = re.compile(r'^macro "[a-z]+" : tactic => `\(tactic\| [^`"$#%()]*\)$', re.M)
"""The one kind of macro: a word for a tactic without arguments. It can fail, but not change a statement."""

_UNUSUAL = re.compile(r"[\"`$%#«»\\]")
_WORD = re.compile(r"[^\W\d][\w'!?]*")
_COMMAND = re.compile(rf"(?<![\w.'])(?:{'|'.join(sorted(COMMANDS - {'class', 'end', 'where'}))})(?![\w.'])")
_OPENING = re.compile(r"(?:@\[\w*\] )?(?:noncomputable )?")
_IMPORT = re.compile(r"^import ([\w.]+)$", re.M)


class Refused(Exception):
    """A rule is broken; says the line and the rule."""


def code_of(text: str) -> str:
    """The text with every comment replaced by spaces, so that lines and columns stay.

    Raises:
        Refused: where Lean might see a comment begin or end elsewhere.
    """
    out: list[str] = []
    position = depth = 0
    while position < len(text):
        pair = text[position : position + 2]
        here = f"line {text.count(chr(10), 0, position) + 1}"
        if not depth and pair in ("/-", "--") and position and not text[position - 1].isspace():
            raise Refused(f"{here}: put a space before the comment")
        if pair == "/-":
            if text[position : position + 4] in ("/--/", "/-!/", "/-/-"):
                raise Refused(f"{here}: put a space after the comment's first sign")
            depth += 1
            out.append("  ")
            position += 2
        elif pair == "-/":
            if not depth:
                raise Refused(f"{here}: '-/' closes no comment")
            depth -= 1
            out.append("  ")
            position += 2
        elif pair == "--" and not depth:
            end = text.find("\n", position)
            end = len(text) if end < 0 else end
            out.append(" " * (end - position))
            position = end
        else:
            out.append(text[position] if not depth or text[position] == "\n" else " ")
            position += 1
    if depth:
        raise Refused("the last comment is not closed")
    return "".join(out)


def imports(code: str) -> list[str]:
    """The modules that a file imports, from its code."""
    return _IMPORT.findall(code)


def refusals(text: str) -> Iterator[str]:
    """What is wrong with a proof file's text, a line each; nothing if it may be checked."""
    try:
        code = code_of(text)
    except Refused as refused:
        yield str(refused)
        return
    for number, line in enumerate(TACTIC_ABBREVIATION.sub("", code).split("\n"), start=1):
        for reason in _refusals_of_line(line):
            yield f"line {number}: {reason}"


def _refusals_of_line(line: str) -> Iterator[str]:
    if found := _UNUSUAL.search(line):
        yield f"'{found.group()}': no strings, quotations, commands with #, or quoted names outside of comments"
    for word in _WORD.findall(line):
        if word in FORBIDDEN:
            yield f"the word '{word}'"
    for attributes in re.findall(r"@\s*\[([^\]]*)", line):
        for name in attributes.split(","):
            if name.strip() not in ATTRIBUTES:
                yield f"the attribute '{name.strip()}'; allowed: {', '.join(ATTRIBUTES)}"
    for rest in line.split("set_option")[1:]:
        if (name := (rest.split() or [""])[0]) not in OPTIONS:
            yield f"the option '{name}'; allowed: {', '.join(OPTIONS)}"
    first = _WORD.match(line.removeprefix("@[elab_as_elim] "))
    if line.strip() and not line[0].isspace() and (first is None or first.group() not in COMMANDS):
        yield f"'{line.split()[0]}' begins a line that is not indented; allowed: {', '.join(sorted(COMMANDS))}"
    for command in _COMMAND.finditer(line):
        if not _OPENING.fullmatch(line[: command.start()]):
            yield f"'{command.group()}' does not begin its line"
    if re.search(r"\bmacro\b", line):
        yield "a macro other than a word for a tactic without arguments"
    if re.search(r"\bimport\b", line) and not _IMPORT.match(line):
        yield "'import' and one module's name stand on a line of their own"
