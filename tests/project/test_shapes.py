"""Every public function of the core that takes tensors says their shapes, in one notation: ``[R, H, D]``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "witcert_core"
SHAPE = re.compile(r"\[(?:\.\.\.|[A-Z0-9])[^\]]*\]")
ELSEWHERE = re.compile(r"(?:As|as|As in|Part of|see) (?::\w+:)?`[^`]+`")
"""A method may point to the one that says it: the protocol it implements, or its sibling."""


def tensor_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions and methods of a module that take a tensor, by name; device code has shapes of its own."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    scopes: list[tuple[str, list[ast.stmt], bool]] = [("", tree.body, False)]
    scopes += [(f"{node.name}.", node.body, bool(node.bases)) for node in classes]
    for prefix, body, inherits in scopes:
        for node in body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if inherits and not ast.get_docstring(node):  # what it overrides says it
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [x for a in arguments if a.annotation is not None for x in ast.walk(a.annotation)]
            if any(isinstance(x, ast.Name) and x.id == "Tensor" for x in names):
                yield f"{prefix}{node.name}", node


def is_host_code(path: Path) -> bool:
    return path.name != "triton.py" and path.parent != CORE / "kernels" / "device"


MODULES = [path for path in sorted(CORE.rglob("*.py")) if is_host_code(path)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CORE)))
def test_shapes_are_said(path: Path) -> None:
    silent = []
    for name, node in tensor_functions(path):
        text = ast.get_docstring(node) or ""
        if not SHAPE.search(text) and not ELSEWHERE.search(text):
            silent.append(f"{name} (line {node.lineno})")
    assert not silent, f"{path.relative_to(CORE.parent)} takes tensors without saying their shapes: {', '.join(silent)}"
