"""`witcert meter`: meter a quantizer on prompts, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from witcert_core.cli.eval import Device, DeviceMap, console
from witcert_core.evaluate.settings import parse_quantizer
from witcert_core.report.probe_text import render_probe
from witcert_core.report.text import render_sentence, render_table

VIOLATED = 1


def show(
    model: Annotated[str, typer.Option(help="Checkpoint directory or hub id; run with transformers.")],
    prompts: Annotated[
        Path, typer.Option(help='A prompt a line, or .jsonl with {"prompt": ...} or {"messages": [...]} a line.')
    ],
    quantizer: Annotated[str | None, typer.Option(help="Name, parameters after a colon: NAME:param=value.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file; --quantizer replaces its quantizer.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="The first one is not read from the cache.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    chat: Annotated[
        bool, typer.Option(help="Put each prompt into the model's chat template, as what a user says.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered side by side.")] = 1,
    probe: Annotated[
        list[str] | None, typer.Option(help="Ask this of the meter beside (docs/probes.md); may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line with prompt, answer and summary instead.")] = False,
) -> None:
    """Answer each prompt from a quantized cache and print what the meter saw; exit 1 if an audit failed."""
    from witcert_core.evaluate.meter_run import choose_policy, meter, read_prompts
    from witcert_core.evaluate.offline.placement import parse_placement

    placement = parse_placement(device, device_map)
    chosen = choose_policy(None if quantizer is None else parse_quantizer(quantizer), policy)
    texts = read_prompts(prompts)
    out = console()
    violations = 0
    told: list[dict[str, Any]] = []
    answers = meter(
        model,
        chosen,
        texts,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        chat=chat,
        batch=batch,
        placement=placement,
        probes=probe or (),
        tell=told.append,
    )
    for prompt, (text, summary) in zip(texts, answers, strict=True):
        violations += summary["audit"]["violations"] + summary["audit"]["mismatches"]
        if as_json:
            asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
            typer.echo(json.dumps({**asked, "answer": text, "summary": summary}))
            continue
        out.print(text, markup=False)
        out.print(render_table(summary))
        out.print(render_sentence(summary), markup=False)
    for answer in told:
        if as_json:
            typer.echo(json.dumps(answer))
        else:
            out.print(render_probe(answer))
    if violations:
        raise typer.Exit(VIOLATED)
