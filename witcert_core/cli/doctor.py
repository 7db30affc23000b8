"""`witcert doctor`: would a server started here be metered, and if not, why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from witcert_core.errors import InputError, did_you_mean, listed
from witcert_core.policy.loader import read_yaml
from witcert_core.policy.model import Policy, load_policy, parse_policy
from witcert_core.policy.presets import PRESETS, preset_text
from witcert_core.serving.doctor import ADAPTERS, POLICY_VARIABLE, Finding, examine, installed_engines
from witcert_core.serving.models.declared import described

REFUSES = 1


def doctor(
    engine: Annotated[str | None, typer.Option(help=f"One of {', '.join(ADAPTERS)}; all of them if left out.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory, hub id, or a config.json alone: no weights are needed.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help=f"Policy file; ${POLICY_VARIABLE} if left out, else the first preset.")
    ] = None,
) -> None:
    """Examine the engines: versions, hooks, what would be metered. Exit code 1 if something refuses."""
    known = list(dict.fromkeys([*ADAPTERS, *installed_engines()]))
    if engine is not None and engine not in known:
        raise InputError(f"--engine {engine}{did_you_mean(engine, known)}; known: {listed(known)}")
    settings, origin = chosen_policy(policy)
    typer.echo(f"policy   {origin}")
    if model is not None and (said := described(model)):
        typer.echo(f"model    {said}")
    refused = engine is None and not installed_engines()  # nothing examined is no good news
    for name in known if engine is None else [engine]:
        for finding in examine(name, model, settings):
            typer.echo(line(name, finding))
            # Without --engine an adapter that is not installed is no complaint.
            refused |= finding.level == "refused" and (engine is not None or finding.subject != "adapter")
    if refused:
        raise typer.Exit(REFUSES)


def chosen_policy(path: Path | None) -> tuple[Policy, str]:
    """The policy to examine and where it is from."""
    if path is None and (named := os.environ.get(POLICY_VARIABLE)):
        return load_policy(named), f"{named} (${POLICY_VARIABLE})"
    if path is not None:
        return load_policy(path), str(path)
    preset = parse_policy(read_yaml(preset_text(PRESETS[0])))
    return preset, f"preset {PRESETS[0]} (no --policy, no ${POLICY_VARIABLE})"


def line(engine: str, finding: Finding) -> str:
    return f"{finding.level:<8} {engine}: {finding.subject}: {finding.text}"
