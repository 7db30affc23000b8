"""`witcert policy`: write a commented policy file, check one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from witcert_core.errors import PolicyError
from witcert_core.policy.model import load_policy
from witcert_core.policy.presets import PRESETS, preset_text

app = typer.Typer(help="Write and check policy files.", no_args_is_help=True)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("policy.yaml"),
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = PRESETS[0],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented policy file."""
    text = preset_text(preset)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        todo = "is a directory; name a file" if path.is_dir() else "exists already; --force overwrites it"
        raise PolicyError(f"{path}: {todo}") from error
    except OSError as error:
        raise PolicyError(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {path} (preset {preset}); start the server with WITCERT_POLICY={shlex.quote(str(path))}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The policy file.")]) -> None:
    """Check a policy file: exit code 0 if it is valid, 2 with the reason if not."""
    policy = load_policy(file)
    layers = policy.quantizer.layers
    where = "all layers" if layers is None else f"layers {', '.join(map(str, layers))}"
    typer.echo(
        f"{file}: ok: quantizer {policy.quantizer.name} on {where}; tier {policy.tier}, "
        f"metering {policy.rows_metered}; gate {policy.gate.kind} at tau {policy.gate.tau:g}"
    )
