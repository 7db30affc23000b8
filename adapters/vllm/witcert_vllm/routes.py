"""Two routes on vLLM's application: `/witcert/status` and `/witcert/requests/{id}`.

vLLM asks for its key on paths that begin with prefixes of its own, so these ask for it themselves, with the same keys
and the same comparison.
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from witcert_core.serving.answers import Shared
from witcert_vllm.http import STATE


def add_routes(app: FastAPI) -> None:
    """Add them, behind the keys that `app` is guarded with (`--api-key`, `VLLM_API_KEY`); open where there are none."""
    tokens = [token for item in app.user_middleware for token in tokens_of(item)]
    guard = AuthenticationMiddleware(app, tokens)

    async def check_key(raw_request: Request) -> None:
        if tokens and not guard.verify_token(raw_request.headers):
            raise HTTPException(401, "Unauthorized")

    async def ask_workers() -> dict[str, Any]:
        found: dict[str, Any] = (await app.state.engine_client.collective_rpc("witcert_status"))[0]
        return found

    shared = Shared(ask_workers)

    async def status() -> JSONResponse:
        return JSONResponse(await shared.get())

    async def request(request_id: str, choice: int | None = None) -> Response:
        reply = STATE.summaries.reply(request_id, choice)
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    guarded = [Depends(check_key)]
    app.add_api_route("/witcert/status", status, methods=["GET"], dependencies=guarded)
    app.add_api_route("/witcert/requests/{request_id:path}", request, methods=["GET"], dependencies=guarded)


def tokens_of(middleware: Any) -> list[str]:
    """The keys of one of an application's middlewares, if it is the one that asks for them."""
    return list(middleware.kwargs["tokens"]) if middleware.cls is AuthenticationMiddleware else []
