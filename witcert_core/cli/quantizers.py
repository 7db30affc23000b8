"""`witcert quantizers`: what a policy can name."""

from __future__ import annotations

import sys
from math import isnan
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from witcert_core.errors import InputError, QuantizerError
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers import QuantizerRegistry
from witcert_core.quantizers.coded import why_not_packed
from witcert_core.quantizers.conformance import check_quantizer

PIPE_WIDTH = 160


def show(
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head, for the byte counts.")] = 128,
    check: Annotated[bool, typer.Option("--check", help="Also hold each against its contract.")] = False,
) -> None:
    """List the quantizers, those of installed plugins included."""
    if check and head_dim % 2:
        raise InputError(f"--head-dim is {head_dim}; --check rotates keys, which takes an even one")
    registry = quantizer_registry()
    table = Table("name", "tier", f"bytes (D={head_dim})", "of 16 bit", "packed", "parameters", "from", box=SIMPLE)
    for name in registry.names():
        table.add_row(name, *_row(registry, name, head_dim))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    if check:
        ready = [name for name in registry.names() if not registry.required(name)]
        for name in ready:
            check_quantizer(registry.get(name), head_dim)
        typer.echo(f"{len(ready)} of {len(registry.names())} checked at head_dim {head_dim}: all keep their contract")


def _size(registry: QuantizerRegistry, name: str, head_dim: int) -> float | None:
    try:
        size = registry.get(name).bytes_per_token_head(head_dim)
    except InputError:
        return float("nan")  # it has no layout at this width; the others have
    except Exception as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise QuantizerError(f"quantizer {name!r}: bytes_per_token_head({head_dim}) failed: {cause}") from error
    if size is not None and not isinstance(size, int | float):
        raise QuantizerError(f"quantizer {name!r}: bytes_per_token_head({head_dim}) is {size!r}; expected a number")
    return size


def _row(registry: QuantizerRegistry, name: str, head_dim: int) -> tuple[str, ...]:
    cls = registry.cls(name)
    size = None if registry.required(name) else _size(registry, name, head_dim)
    exact = 4.0 * head_dim
    told = "not declared" if size is None else "not this wide" if isnan(size) else f"{size:g}"
    return (
        cls.tier + ("+w" if cls.stored_witness else ""),
        told,
        "" if size is None or isnan(size) else f"{size / exact:.1%}",
        "" if registry.required(name) or why_not_packed(registry.get(name)) else "yes",
        ", ".join(registry.parameters(name)),
        registry.source(name),
    )
