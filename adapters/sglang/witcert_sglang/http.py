"""What HTTP clients get: summaries on their answers (`answers.py` here), and two routes.

`/witcert/status` and `/witcert/requests/{id}` are routes of SGLang's own application, so what guards its others
(`--api-key`) guards them as well: `add_routes` makes sure that both are marked as ordinary ones.
"""

from __future__ import annotations

from typing import Any

from witcert_core.serving.answers import Answer, Reply, SummaryStore


class MainState:
    """Summaries of the latest requests, and what the scheduler said it meters."""

    def __init__(self) -> None:
        self.summaries = SummaryStore()
        self.status: dict[str, Any] | None = None

    def alias(self, answer_id: str, request_id: str) -> None:
        """Let a request be found by the id of its answer, where a client sees no other."""
        answer = Answer()
        answer.add(request_id)
        self.summaries.answer(answer_id, answer)


STATE = MainState()


def add_routes() -> None:
    """Add `/witcert/status` and `/witcert/requests/{request_id}` to SGLang's application."""
    from fastapi.responses import JSONResponse, Response
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def response(reply: Reply) -> Response:
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    # As `/generate`: whoever may ask for an answer may ask for its summary.
    @auth_level(AuthLevel.NORMAL)
    async def status() -> JSONResponse:
        return JSONResponse(STATE.status)

    @auth_level(AuthLevel.NORMAL)
    async def request(request_id: str, choice: int | None = None) -> Response:
        return response(STATE.summaries.reply(request_id, choice))

    app.add_api_route("/witcert/status", status, methods=["GET"])
    app.add_api_route("/witcert/requests/{request_id:path}", request, methods=["GET"])
