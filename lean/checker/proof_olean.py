"""Read what Lean compiled: the constants of a module, what each of them rests on, and which of them are instances.

A ``.olean`` file is Lean's heap written out: a header, then objects, each of which begins with 8 bytes that give its
kind, and points to others by the address it had. This is read without Lean, so nothing that a project makes Lean
print can change what is found. The layout is that of Lean 4.35.0, which the header must say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

VERSION = b"4.35.0"
_HEADER = struct.Struct("<5s B B 33s 40s Q")
"""Mark, version of the format, flags, Lean's version, its commit, the address of the file's first byte."""

KINDS = ("axiom", "def", "theorem", "opaque", "quotient", "inductive", "constructor", "recursor")
"""Kinds of constants, in the order of Lean's constructors."""
_ARRAY, _STRING = 246, 249
_CONST, _LITERAL, _PROJECTION = 4, 9, 11


@dataclass(frozen=True)
class Constant:
    """A declaration: its kind (:data:`KINDS`), and the names that its type, and its type, value and parts, say."""

    name: str
    kind: str
    in_type: frozenset[str]
    used: frozenset[str]


@dataclass(frozen=True)
class Module:
    """A compiled module."""

    constants: dict[str, Constant] = field(default_factory=dict)
    instances: frozenset[str] = frozenset()


class _Heap:
    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        mark, form, _, version, _, self.base = _HEADER.unpack_from(self.data)
        if mark != b"olean" or form != 2 or version.rstrip(b"\0") != VERSION:
            raise ValueError(f"{path} was not written by Lean {VERSION.decode()}: {mark!r} {form} {version!r}")
        self.names: dict[int, str] = {}
        self.said: dict[int, frozenset[str]] = {}

    def word(self, offset: int) -> int:
        return int.from_bytes(self.data[offset : offset + 8], "little")

    def at(self, offset: int) -> int:
        """The offset of the object that the pointer here points to; ``-1 - n`` for a number ``n`` in its place."""
        pointer = self.word(offset)
        return -1 - (pointer >> 1) if pointer & 1 else pointer - self.base

    def tag(self, obj: int) -> int:
        return self.data[obj + 7] if obj >= 0 else -1 - obj

    def fields(self, obj: int) -> list[int]:
        """The objects that a constructor holds."""
        return [] if obj < 0 else [self.at(obj + 8 + 8 * i) for i in range(self.data[obj + 6])]

    def array(self, obj: int) -> list[int]:
        if self.tag(obj) != _ARRAY:
            raise ValueError(f"expected an array at {obj}, found kind {self.tag(obj)}")
        return [self.at(obj + 24 + 8 * i) for i in range(self.word(obj + 8))]

    def list(self, obj: int) -> Iterator[int]:
        while obj >= 0:
            head, obj = self.fields(obj)
            yield head

    def string(self, obj: int) -> str:
        if self.tag(obj) != _STRING:
            raise ValueError(f"expected a string at {obj}, found kind {self.tag(obj)}")
        return self.data[obj + 32 : obj + 31 + self.word(obj + 8)].decode()

    def name(self, obj: int) -> str:
        if obj < 0:
            return ""
        if obj not in self.names:
            prefix, last = self.fields(obj)
            part = self.string(last) if self.tag(obj) == 1 else str(-1 - last)
            self.names[obj] = f"{self.name(prefix)}.{part}".lstrip(".")
        return self.names[obj]

    def constants_in(self, expression: int) -> frozenset[str]:
        """The constants that an expression says."""
        stack = [expression]
        seen: set[int] = set()
        found: set[str] = set()
        while stack:
            obj = stack.pop()
            if obj < 0 or obj in seen:
                continue
            seen.add(obj)
            tag, fields = self.tag(obj), self.fields(obj)
            if tag == _CONST:
                found.add(self.name(fields[0]))
            elif tag == _PROJECTION:
                found.add(self.name(fields[0]))
                stack.append(fields[2])
            elif tag in (5, 10):  # application, annotation
                stack += fields if tag == 5 else fields[1:]
            elif tag in (6, 7, 8):  # function, its type, let: a bound name first
                stack += fields[1:]
            elif tag == _LITERAL:
                found.add("Nat" if self.tag(fields[0]) == 0 else "String")
            elif tag not in (0, 3):  # bound variable, sort
                raise ValueError(f"unexpected kind {tag} of expression")
        return frozenset(found)


def _constant(heap: _Heap, obj: int) -> Constant:
    kind = KINDS[heap.tag(obj)]
    value = heap.fields(obj)[0]
    parts = heap.fields(value)
    declared, rest = parts[0], parts[1:]
    name, _, expression = heap.fields(declared)
    in_type = heap.constants_in(expression)
    used = set(in_type)
    if kind in ("def", "theorem", "opaque"):
        used |= heap.constants_in(rest[0])
    elif kind == "inductive":  # parameters, indices, all of its block, constructors
        used |= {heap.name(other) for names in rest[2:4] for other in heap.list(names)}
    elif kind == "constructor":
        used.add(heap.name(rest[0]))
    elif kind == "recursor":
        used |= {heap.name(other) for other in heap.list(rest[0])}
        for rule in heap.list(rest[5]):
            used |= heap.constants_in(heap.fields(rule)[2])
    return Constant(heap.name(name), kind, in_type, frozenset(used))


def read(path: Path) -> Module:
    """Read a compiled module.

    Raises:
        ValueError: if the file is not one of Lean 4.35.0.
    """
    heap = _Heap(path)
    root = heap.fields(heap.at(_HEADER.size))
    _, names, constants, _, entries = root
    read = [_constant(heap, obj) for obj in heap.array(constants)]
    if [c.name for c in read] != [heap.name(obj) for obj in heap.array(names)]:
        raise ValueError(f"{path}: the names do not fit the constants")
    instances: set[str] = set()
    for entry in heap.array(entries):
        extension, values = heap.fields(entry)
        if heap.name(extension) == "Lean.Meta.instanceExtension":
            for instance in heap.array(values):
                instances |= heap.constants_in(heap.fields(heap.fields(instance)[0])[1])
    return Module({c.name: c for c in read}, frozenset(instances))
