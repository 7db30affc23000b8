"""`witcert capacity`: tokens that fit a model's cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from witcert_core.evaluate.capacity import DEFAULT_LAYOUTS, capacity, parse_memory, read_shape

PIPE_WIDTH = 120
_LAYOUT_HELP = "fp16, fp8, int8_dither, int8_dither_w, bypass:PAIRS or metered:QUANTIZER; repeat for several."


def show(
    config: Annotated[Path, typer.Option(help="A model's config.json, or the directory that holds it.")],
    memory: Annotated[str, typer.Option(help="Memory of one rank's cache: 40GB (10^9) or 40GiB (2^30).")],
    layout: Annotated[list[str] | None, typer.Option(help=_LAYOUT_HELP)] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that share the KV heads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Bytes of a token, tokens that fit, and the ratio to a 16-bit cache."""
    shape = read_shape(config)
    size = parse_memory(memory)
    rows = [capacity(name, shape, size, tp) for name in layout or DEFAULT_LAYOUTS]
    if as_json:
        typer.echo(json.dumps({"memory": size, "tp": tp, "layouts": [asdict(row) for row in rows]}, indent=1))
        return
    heads = shape.heads_of_a_rank(tp)
    title = f"{shape.num_layers} layers x {heads} KV heads x head_dim {shape.head_dim} a rank, {size} bytes"
    table = Table("layout", title=title, box=SIMPLE)
    for column in ("bytes a token", "tokens", "against 16 bit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.layout, str(row.bytes_per_token), str(row.tokens), f"{row.ratio:.3f}x")
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    if shape.sliding_layers:
        typer.echo(f"{shape.sliding_layers} layers have a window; counted here as if they kept every token")
