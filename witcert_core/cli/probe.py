"""`witcert probe`: ask a running server's meter, until the probe ends or Ctrl-C, and print the answer."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer

from witcert_core.cli.eval import console
from witcert_core.errors import InputError
from witcert_core.report.probe_text import render_probe

ROUTE = "/witcert/probes"
POLL_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0


def ask(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:30000.")],
    probe: Annotated[str, typer.Argument(help="What is asked, for example 'max(bound) by layer' (docs/probes.md).")],
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
) -> None:
    """Enable a probe on a running server, wait until it ends, and print its answer; Ctrl-C ends it before.

    The server's policy must say `report.control: true`. Its key is taken from WITCERT_API_KEY.
    """
    name = str(_call(url, "POST", ROUTE, {"probe": probe})["id"])
    try:
        while not _call(url, "GET", f"{ROUTE}/{name}")["ended"]:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        pass  # what was asked for so far is the answer
    answer = _call(url, "DELETE", f"{ROUTE}/{name}")
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        console().print(render_probe(answer))


def _call(url: str, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The server's JSON object; InputError in one line for any other answer, or none."""
    key = os.environ.get("WITCERT_API_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data=data, headers=headers, method=method)
        with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            found = json.load(response)
    except HTTPError as error:
        raise InputError(f"{url}: {_said(error)}") from error
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"{url}: cannot be asked: {getattr(error, 'reason', None) or error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{url}: {path} answers with no JSON object; is that a metered server?")
    return found


def _said(error: HTTPError) -> str:
    """What a refusal says, or its status where it has no words of ours."""
    try:
        said = json.loads(error.read())["error"]
    except (ValueError, KeyError, TypeError):
        said = None
    if isinstance(said, str) and error.code not in (401, 403):
        return said
    hint = {401: "; set WITCERT_API_KEY to its key", 404: "; is that a metered server?"}.get(error.code, "")
    return f"{said or error.reason} ({error.code}){hint}"
