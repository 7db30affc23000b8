"""What HTTP clients get: `kv_transfer_params.witcert` on answers that are not streamed, and two routes for the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

META_KEY = "witcert"
KEPT_SUMMARIES = 4096


class MainState:
    """Summaries of the latest requests, by every id under which a client may know them."""

    def __init__(self) -> None:
        self.summaries: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.choices: OrderedDict[str, dict[int, dict[str, Any]]] = OrderedDict()

    def keep(self, request_id: str, summary: dict[str, Any]) -> None:
        self.summaries[request_id] = summary
        if len(self.summaries) > KEPT_SUMMARIES:
            self.summaries.popitem(last=False)

    def keep_choice(self, answer_id: str, index: int, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Keep the summary of one choice of an answer; returns those of all its choices so far, in order."""
        choices = self.choices.setdefault(answer_id, {})
        choices[index] = summary
        if len(self.choices) > KEPT_SUMMARIES:
            self.choices.popitem(last=False)
        return [choices[i] for i in sorted(choices)]

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Summaries of a request: under its id in the engine, or of the choices of an answer."""
        if request_id in self.summaries:
            return [self.summaries[request_id]]
        # An answer to several prompts has one id; its prompts are numbered after it.
        numbered = [self.choices.get(f"{request_id}-{i}") for i in range(KEPT_SUMMARIES)]
        found = [self.choices.get(request_id), *numbered]
        return [choices[i] for choices in found if choices is not None for i in sorted(choices)]


STATE = MainState()


def around_build_app(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """vLLM's application with `/witcert/status` and `/witcert/requests/{request_id}`."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    app = original(*args, **kwargs)

    async def status(raw_request: Request) -> JSONResponse:
        return JSONResponse((await raw_request.app.state.engine_client.collective_rpc("witcert_status"))[0])

    async def request(request_id: str) -> JSONResponse:
        summaries = STATE.find(request_id)
        if not summaries:
            message = (
                f"no summary for request {request_id!r}: it is unknown, not finished, or older than the last "
                f"{KEPT_SUMMARIES} requests"
            )
            return JSONResponse({"error": message}, status_code=404)
        return JSONResponse(summaries[0] if len(summaries) == 1 else summaries)

    status.__annotations__["raw_request"] = Request
    app.add_api_route("/witcert/status", status, methods=["GET"])
    app.add_api_route("/witcert/requests/{request_id}", request, methods=["GET"])
    return app


def around_process_outputs(
    original: Callable[..., Any], processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the summaries that arrive with outputs, and let an answer carry those of all its choices."""
    for output in engine_core_outputs:
        params = output.kv_transfer_params
        state = processor.request_states.get(output.request_id)
        if params is None or META_KEY not in params or state is None:
            continue
        summary = params[META_KEY]
        STATE.keep(output.request_id, summary)
        parent = state.parent_req
        answer = state.external_req_id if parent is None else parent.external_req_id
        params[META_KEY] = STATE.keep_choice(answer, state.request_index, summary)
    return original(processor, engine_core_outputs, *args, **kwargs)
