"""What HTTP clients get: routes of ours, and summaries on SGLang's answers where each has room for one.

All routes take their text from the tokenizer manager, whose `meta_info` carries the summary of a finished request;
`/generate`, `/vertex_generate` and gRPC hand it on as it is. The others make answers of their own: OpenAI's,
Anthropic's and Ollama's get `metadata.witcert`, on the answer or on the last chunk of its stream. Whatever a client
knows its answer by is found at `/witcert/requests/{id}`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from witcert_core import Policy
from witcert_core.serving import META_KEY, Answer, Command, Probes, SummaryStore, add_probe_routes, http
from witcert_sglang.hooks import Hook

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"


FACTS = ("lora", "prompt", "priority")
"""What `SchedulerProcess` says of a request to probes."""


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


def add_routes(policy: Policy) -> None:
    """Add `/witcert/status`, `/witcert/requests/{id}` and `/witcert/probes` to SGLang's application.

    What guards its other routes (`--api-key`) guards these as well: whoever may ask for an answer may ask for its
    summary. Probes are as its administrative routes are (`--admin-api-key`).
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def status() -> dict[str, Any]:
        return STATE.status or {}

    http.add_routes(app, STATE.summaries, status, policy, mark=auth_level(AuthLevel.NORMAL))
    probes = Probes(tell_scheduler, FACTS, policy.report.control)
    add_probe_routes(app, probes, mark=auth_level(AuthLevel.ADMIN_OPTIONAL))


async def tell_scheduler(command: Command | None) -> list[dict[str, Any]]:
    """Take a command to all scheduler processes; the answers of all probes then.

    It goes the way of SGLang's control requests, which every rank gets in the same round of its loop. One of them
    carries what its receiver understands: `DumperControlReqInput`, under a method that is not the dumper's.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import DumperControlReqInput

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()  # which the first request does, if none came before
    (reply,) = await manager.dumper_control(DumperControlReqInput(method=META_KEY, body=dict(command or {})))
    found: list[dict[str, Any]] = reply.response
    return found


def hooks(policy: Policy) -> list[Hook]:
    """The hooks that put summaries on answers; none without `report.per_request`."""
    if not policy.report.per_request:
        return []
    meta = ("self", "meta_info", "state", "customized_info", "index", "finish_reason")
    stream = ("self", "adapted_request", "request", "raw_request")
    build = ("self", "request", "ret", "created")
    messages = ("self", "adapted_request", "processed_request", "anthropic_request", "raw_request")
    ollama = ("self", "gen_request", "raw_request", "model_name")
    return [
        Hook(f"{_TOKENIZER}.update_request_meta_info", "around", around_update_meta_info, "main", meta),
        Hook(f"{_CHAT}._build_chat_response", "after", after_build_response, "main", build),
        Hook(f"{_COMPLETION}._build_completion_response", "after", after_build_response, "main", build),
        Hook(f"{_CHAT}._generate_chat_stream", "around", around_stream, "main", stream),
        Hook(f"{_COMPLETION}._generate_completion_stream", "around", around_stream, "main", stream),
        Hook(f"{_MESSAGES}._convert_response", "after", after_convert_message, "main", ("self", "response")),
        Hook(f"{_MESSAGES}._generate_anthropic_stream", "around", around_message_stream, "main", messages),
        *(
            Hook(f"{_OLLAMA}._{kind}_response", "around", around_ollama, "main", ollama)
            for kind in ("generate_chat", "generate_generate")
        ),
        *(
            Hook(f"{_OLLAMA}._{kind}_response", "around", around_ollama_stream, "main", ollama)
            for kind in ("stream_chat", "stream_generate")
        ),
    ]


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
        STATE.summaries.keep(meta_info["id"], summaries[index][0])
        STATE.summaries.totals.add(summaries[index][0])


# OpenAI ---------------------------------------------------------------------------------------------------------


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
    summary = STATE.summaries.summary(chunk.get("id", ""))
    if summary is None:
        return event
    chunk["metadata"] = {**(chunk.get("metadata") or {}), META_KEY: [summary]}
    return f"{head}{separator}{json.dumps(chunk)}\n\n"


# Anthropic ------------------------------------------------------------------------------------------------------


def after_convert_message(result: Any, _self: Any, response: Any) -> Any:
    """A message of Anthropic's, whose id is its own, with the summaries of the chat completion it was made of."""
    STATE.alias(result.id, response.id)
    return with_metadata(result, (response.metadata or {}).get(META_KEY))


async def around_message_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted_request: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """Pass an Anthropic stream through: its first event names the message, the one with the stop reason sums it up."""
    async for event in original(serving, adapted_request, *args, **kwargs):
        if event.startswith("event: message_start\n"):
            STATE.alias(event_data(event)["message"]["id"], adapted_request.rid)
        elif event.startswith("event: message_delta\n"):
            summary = STATE.summaries.summary(adapted_request.rid)
            if summary is not None:
                data = json.dumps({**event_data(event), "metadata": {META_KEY: [summary]}})
                event = f"event: message_delta\ndata: {data}\n\n"
        yield event


def event_data(event: str) -> dict[str, Any]:
    """The JSON of a server-sent event."""
    data: dict[str, Any] = json.loads(event.partition("data: ")[2])
    return data


# Ollama ---------------------------------------------------------------------------------------------------------


async def around_ollama(
    original: Callable[..., Awaitable[Any]], serving: Any, gen_request: Any, *args: Any, **kwargs: Any
) -> Any:
    """An answer of Ollama's, which has no id, with the summary."""
    result = await original(serving, gen_request, *args, **kwargs)
    summary = STATE.summaries.summary(gen_request.rid)
    return with_metadata(result, None if summary is None else [summary])


async def around_ollama_stream(
    original: Callable[..., Awaitable[Any]], serving: Any, gen_request: Any, *args: Any, **kwargs: Any
) -> Any:
    """A stream of Ollama's, JSON lines, with the summary on its last."""
    response = await original(serving, gen_request, *args, **kwargs)
    lines = response.body_iterator

    async def summed_up() -> AsyncIterator[bytes]:
        async for line in lines:
            chunk = json.loads(line)
            summary = STATE.summaries.summary(gen_request.rid) if chunk["done"] else None
            if summary is None:
                yield line
            else:
                yield json.dumps({**chunk, "metadata": {META_KEY: [summary]}}).encode() + b"\n"

    response.body_iterator = summed_up()
    return response


def with_metadata(answer: Any, summaries: list[dict[str, Any]] | None) -> Any:
    """`answer`, a pydantic model without room for more, with `metadata.witcert`; itself if there are no summaries."""
    if summaries is None:
        return answer
    return _widened(type(answer)).model_construct(  # type: ignore[arg-type]
        **dict(answer), metadata={META_KEY: summaries}
    )


@functools.cache
def _widened(model: type[Any]) -> Any:
    from pydantic import create_model

    return create_model(model.__name__, __base__=model, metadata=(dict[str, Any], ...))
