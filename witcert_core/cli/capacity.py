"""`witcert capacity`: tokens that fit a model's cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from witcert_core.evaluate.capacity import (
    DEFAULT_LAYOUTS,
    OF_LATENTS,
    capacity,
    heads_of_a_rank,
    parse_memory,
    read_shape,
)
from witcert_core.serving.models.attention import ModelAttention

PIPE_WIDTH = 120
_LAYOUT_HELP = (
    "fp16, fp8, int8_dither, int8_dither_w, bypass:PAIRS, packed:QUANTIZER or metered:QUANTIZER; repeat for several."
)


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
    layouts = layout or (OF_LATENTS if shape.latent_dim else DEFAULT_LAYOUTS)
    rows = [capacity(name, shape, size, tp) for name in layouts]
    if as_json:
        found = {"memory": size, "tp": tp, "layouts": [asdict(row) for row in rows], "notes": list(notes(shape))}
        typer.echo(json.dumps(found, indent=1))
        return
    title = f"{layers_of(shape, tp)} a rank, {size} bytes"
    table = Table("layout", title=title, box=SIMPLE)
    for column in ("bytes a token", "tokens", "against 16 bit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.layout, str(row.bytes_per_token), str(row.tokens), f"{row.ratio:.3f}x")
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    for note in notes(shape):
        typer.echo(note)


def layers_of(shape: ModelAttention, tp: int) -> str:
    """The layers that cache something, by their shape."""
    if shape.latent_dim:
        return f"{len(shape.layers)} layers x {shape.layers[0].head_dim} channels of a latent and RoPE"
    return " + ".join(
        f"{layers} layers x {heads_of_a_rank(heads, tp)} KV heads x head_dim {k if k == v else f'{k} and {v}'}"
        for (heads, k, v), layers in shape.shapes.items()
    )


def notes(shape: ModelAttention) -> Iterator[str]:
    """What the number of tokens leaves out."""
    if windows := shape.windows:
        longest = max(layer.window or 0 for layer in windows)
        yield f"{len(windows)} layers have a window (of {longest} tokens); counted here as if they kept every token"
    if others := shape.num_hidden_layers - len(shape.layers):
        what = "use the cache of others or keep" if "shared" in shape.kinds else "keep"
        yield f"{others} of {shape.num_hidden_layers} layers {what} no keys and values; states are not counted"
