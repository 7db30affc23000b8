"""`witcert canary`: drift of a share of a server's traffic, beside the meter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from witcert_core.errors import InputError


def show(
    url: Annotated[str, typer.Option(help="A metered server (SGLang, vLLM) under prefill_reads: chunk_exact.")],
    traffic: Annotated[
        Path,
        typer.Option(
            help='A growing file: {"prompt" or "messages", "text", "id", "cache_salt"} a line, or what SGLang logs '
            "with --log-requests --log-requests-level 3 --log-requests-format json --log-requests-target DIRECTORY."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File for a JSON line of each scored request; it is appended to.")],
    share: Annotated[
        float, typer.Option(help="Of the requests that are seen, at most: 0.01 takes one of 100. 0 takes none.")
    ] = 0.0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="For Prometheus.")] = 9464,
    host: Annotated[str, typer.Option(help="Address that port is opened at.")] = "127.0.0.1",
    model: Annotated[str | None, typer.Option(help="Where the tokenizer is; default: where the server says.")] = None,
    chat: Annotated[bool, typer.Option(help="Prompts that are texts are what a user says.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens written and scored of a request, at most.")] = 64,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a prompt; longer ones are left out.")] = 4096,
    per_minute: Annotated[float, typer.Option(min=0.001, help="Requests scored in a minute, at most.")] = 6.0,
) -> None:
    """Score a share of a server's requests by exact keys, as they come: did the text change, and did the meter say so?

    Each request that is drawn costs the server two more, or three where the served answer is not the greedy one; none
    is asked unless --share says how many. PRIVACY: it reads the prompts and answers in --traffic and sends those that
    are drawn to --url, again and nowhere else, under ids of its own and the request's own cache salt; --out and the
    metrics hold request ids, counts and distances, no text and no tokens. SIGTERM or Ctrl-C ends it.
    """
    from witcert_core.evaluate.canary import CanaryRun, run

    if not 0 < share <= 1:
        raise InputError(f"--share is {share:g}, and nothing is taken before it says how much: 0.01 is one of 100")
    run(CanaryRun(url, traffic, out, share, host, port, model, chat, tokens, longest, per_minute))
