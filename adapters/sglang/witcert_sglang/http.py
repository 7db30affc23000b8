"""What HTTP clients get: `meta_info["witcert"]`, `metadata.witcert` on OpenAI answers, and two routes.

OpenAI clients see `meta_info` only on request and never while streaming, so the summary is also put on the answer's
`metadata` field, on the final chunk of a stream, and kept for `GET /witcert/requests/{id}` (the id of the answer).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from witcert_core.policy import Policy
from witcert_sglang.hooks import Hook
from witcert_sglang.results import META_KEY

KEPT_SUMMARIES = 4096
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"


class MainState:
    """Summaries of the latest requests, by request id, and what the scheduler said it meters."""

    def __init__(self) -> None:
        self.summaries: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.status: dict[str, Any] | None = None

    def keep(self, request_id: str, summary: dict[str, Any]) -> None:
        self.summaries[request_id] = summary
        if len(self.summaries) > KEPT_SUMMARIES:
            self.summaries.popitem(last=False)


STATE = MainState()


def hooks(policy: Policy) -> list[Hook]:
    """The hooks that put summaries on answers; none without `report.per_request`."""
    wanted = []
    if policy.report.per_request:
        stream = ("self", "adapted_request", "request", "raw_request")
        build = ("self", "request", "ret", "created")
        wanted += [
            Hook(
                f"{_TOKENIZER}.update_request_meta_info",
                "around",
                around_update_meta_info,
                "main",
                ("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
            ),
            Hook(f"{_CHAT}._build_chat_response", "after", after_build_response, "main", build),
            Hook(f"{_COMPLETION}._build_completion_response", "after", after_build_response, "main", build),
            Hook(f"{_CHAT}._generate_chat_stream", "around", around_stream, "main", stream),
            Hook(f"{_COMPLETION}._generate_completion_stream", "around", around_stream, "main", stream),
        ]
    return wanted


def add_routes() -> None:
    """Add `/witcert/status` and `/witcert/requests/{request_id}` to SGLang's application."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    async def status() -> JSONResponse:
        return JSONResponse(STATE.status)

    async def request(request_id: str) -> JSONResponse:
        summary = STATE.summaries.get(request_id)
        if summary is None:
            message = (
                f"no summary for request {request_id!r}: it is unknown, not finished, or older than the last "
                f"{KEPT_SUMMARIES} requests"
            )
            return JSONResponse({"error": message}, status_code=404)
        return JSONResponse(summary)

    app.add_api_route("/witcert/status", status, methods=["GET"])
    app.add_api_route("/witcert/requests/{request_id}", request, methods=["GET"])


def around_update_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    """Put the summary, one object and not a list a token, into `meta_info` of the request's last output."""
    others = {key: values for key, values in customized_info.items() if key != META_KEY}
    original(manager, meta_info, state, others, index, finish_reason)
    summaries = customized_info.get(META_KEY)
    if summaries is not None and summaries[index]:
        meta_info[META_KEY] = summaries[index][0]
        STATE.keep(meta_info["id"], summaries[index][0])


def after_build_response(result: Any, _self: Any, _request: Any, ret: list[dict[str, Any]], *_args: Any) -> Any:
    """Put the summaries, one a choice, on the `metadata` of an OpenAI answer."""
    if hasattr(result, "metadata"):
        summaries = [item["meta_info"].get(META_KEY) for item in ret]
        result.metadata = {**(result.metadata or {}), META_KEY: summaries}
    return result


async def around_stream(
    original: Callable[..., AsyncIterator[str]],
    serving: Any,
    adapted_request: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[str]:
    """Pass an OpenAI stream through; the chunk that carries a finish reason also carries the summary.

    With several choices the chunk's id does not say which of them it belongs to, so nothing is added (each choice
    is still under its own id at `/witcert/requests/{id}`).
    """
    single = (request.n or 1) == 1
    async for event in original(serving, adapted_request, request, *args, **kwargs):
        yield with_summary(event) if single and '"finish_reason":"' in event else event


def with_summary(event: str) -> str:
    """A server-sent event `data: {...}` with the summary of its request as `metadata.witcert`, if there is one."""
    head, separator, body = event.partition("data: ")
    chunk = json.loads(body)
    summary = STATE.summaries.get(chunk.get("id", ""))
    if summary is None:
        return event
    chunk["metadata"] = {**(chunk.get("metadata") or {}), META_KEY: [summary]}
    return f"{head}{separator}{json.dumps(chunk)}\n\n"
