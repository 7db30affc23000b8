"""Probes of a running server, as HTTP clients enable them, read them and end them.

The process that answers HTTP checks a probe, names it and tells the engine; the engine's own channel takes the command
to every process that plans passes, so that all of them know of it between the same two. It also keeps the time: what
ranks plan must not depend on their clocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from witcert_core.errors import ProbeError
from witcert_core.probes.language import LONGEST, parse_probe
from witcert_core.probes.watches import Command
from witcert_core.serving.http import Reply, refusal

PROBES_ROUTE = "/witcert/probes"
PROBE_ROUTE = "/witcert/probes/{probe_id}"
MAX_PROBES = 16
"""Enabled at a time."""
LARGEST_BODY = 8 * LONGEST
"""Bytes of a request that enables a probe."""
TIME_IS_UP, TOLD_TO = "seconds", "told to"

Tell = Callable[[Command | None], Awaitable[list[dict[str, Any]]]]
"""Takes a command, or none, to every process of the engine; what all probes answer then (`ProbeBoard.shown`)."""


class Probes:
    """facts: of `fields.FACTS`, those the engine says of its requests. allowed: `report.control` of the policy."""

    def __init__(self, tell: Tell, facts: Collection[str], allowed: bool) -> None:
        self._tell = tell
        self._facts = facts
        self._allowed = allowed
        self._timers: set[asyncio.Task[None]] = set()

    async def enable(self, body: bytes) -> Reply:
        """`{"probe": TEXT}` -> 201 and the probe; 400 with the column of a mistake; 409 beside `MAX_PROBES` others."""
        if not self._allowed:
            return self._closed()
        if len(body) > LARGEST_BODY:
            return refusal(413, f"the request has more than {LARGEST_BODY} bytes")
        try:
            given = json.loads(body)
        except ValueError:  # no JSON, or no UTF-8
            given = None
        text = given.get("probe") if isinstance(given, dict) and set(given) == {"probe"} else None
        if not isinstance(text, str):
            return refusal(400, 'the request is no JSON object {"probe": "..."}')
        try:
            probe = parse_probe(text, self._facts)
        except ProbeError as error:
            return _reply(400, {"error": str(error), "column": error.column})
        if sum(not shown["ended"] for shown in await self._tell(None)) >= MAX_PROBES:
            return refusal(409, f"{MAX_PROBES} probes are enabled; end one of them (DELETE {PROBE_ROUTE})")
        name = secrets.token_hex(8)
        shown = await self._tell({"do": "enable", "id": name, "text": text})
        log("enabled", name, text)
        timer = asyncio.create_task(self._end_in(probe.seconds, name, text))
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)
        return self._found(shown, name, 201)

    async def show(self, name: str | None = None) -> Reply:
        """The answers of all probes that are kept, or of one."""
        if not self._allowed:
            return self._closed()
        if name is not None and not re.fullmatch("[0-9a-f]{16}", name):
            return refusal(404, "that is no id of a probe; it has 16 hexadecimal digits")
        shown = await self._tell(None)
        return _reply(200, shown) if name is None else self._found(shown, name)

    async def end(self, name: str) -> Reply:
        """End a probe and forget its answer, which is what the reply has for the last time."""
        found = await self.show(name)
        if found.status == 200:
            shown = await self._tell({"do": "end", "id": name, "text": TOLD_TO})
            found = self._found(shown, name)
            await self._tell({"do": "forget", "id": name, "text": ""})
            log("ended", name, str(json.loads(found.body).get("probe", "")))
        return found

    async def _end_in(self, seconds: float, name: str, text: str) -> None:
        await asyncio.sleep(seconds)
        shown = await self._tell({"do": "end", "id": name, "text": TIME_IS_UP})
        if any(one["id"] == name and one["ended"] == TIME_IS_UP for one in shown):
            log("ended", name, text)

    def _found(self, shown: list[dict[str, Any]], name: str, status: int = 200) -> Reply:
        for one in shown:
            if one["id"] == name:
                return _reply(status, one)
        return refusal(404, f"no probe {name}: it was never enabled, was ended, or is older than the last answers")

    def _closed(self) -> Reply:
        return refusal(403, "this server takes no probes; set report.control: true in its policy")


def _reply(status: int, found: object) -> Reply:
    return Reply(status, json.dumps(found, allow_nan=False).encode())


def log(did: str, name: str, text: str) -> None:
    """One line for what was changed from outside, with the hash of the probe's text."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"witcert: probe {name} {did}, sha256 {digest}: {json.dumps(text)}", file=sys.stderr, flush=True)


def add_probe_routes(
    app: Any,
    probes: Probes,
    mark: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda handler: handler,
    **options: Any,
) -> None:
    """Add the routes of probes to an engine's application; mark and options as in `http.add_routes`."""
    from starlette.requests import Request
    from starlette.responses import Response

    def response(reply: Reply) -> Any:
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    async def create(request: Any) -> Any:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                break
        return response(await probes.enable(body))

    async def show_all() -> Any:
        return response(await probes.show())

    async def show_one(probe_id: str) -> Any:
        return response(await probes.show(probe_id))

    async def end(probe_id: str) -> Any:
        return response(await probes.end(probe_id))

    create.__annotations__["request"] = Request  # FastAPI would look the name up in this module
    for path, method, handler in (
        (PROBES_ROUTE, "POST", create),
        (PROBES_ROUTE, "GET", show_all),
        (PROBE_ROUTE, "GET", show_one),
        (PROBE_ROUTE, "DELETE", end),
    ):
        app.add_api_route(path, mark(handler), methods=[method], response_model=None, **options)
