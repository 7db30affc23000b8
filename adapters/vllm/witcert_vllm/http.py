"""What HTTP clients get: `kv_transfer_params.witcert` on answers that are not streamed, and two routes for the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
META_KEY = "witcert"
KEPT_SUMMARIES = 4096


class MainState:
    """Summaries of the latest requests, by every id under which a client may know them."""

    def __init__(self) -> None:
        self.summaries: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.choices: OrderedDict[str, dict[int, dict[str, Any]]] = OrderedDict()
        self._of_parent: WeakKeyDictionary[Any, dict[int, dict[str, Any]]] = WeakKeyDictionary()
        self._expected: OrderedDict[str, tuple[str, Any, int]] = OrderedDict()

    def expect(self, request_id: str, answer_id: str, parent: Any, index: int) -> None:
        """Request `request_id` of the engine is choice `index` of an answer; its summary may come after the answer.

        parent: vLLM's `ParentRequest` of several choices, else None. Clients choose ids and use them again, so an id
        alone does not say whose choices these are.
        """
        if request_id not in self._expected:
            put(self._expected, request_id, (answer_id, parent, index))

    def keep(self, request_id: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """Keep a summary; returns those of all choices of its answer so far, in order."""
        put(self.summaries, request_id, summary)
        if request_id not in self._expected:
            return [summary]
        answer_id, parent, index = self._expected.pop(request_id)
        choices = {} if parent is None else self._of_parent.setdefault(parent, {})
        choices[index] = summary
        put(self.choices, answer_id, choices)
        return [choices[i] for i in sorted(choices)]

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Summaries of a request: under its id in the engine, or of the choices of an answer."""
        if request_id in self.summaries:
            return [self.summaries[request_id]]
        if request_id in self.choices:
            found = [self.choices[request_id]]
        else:  # Prompts of one completion are numbered after its id, so are the turns of one of `/v1/responses`.
            names = [f"{request_id}{mark}{i}" for mark in "-_" for i in range(KEPT_SUMMARIES)]
            found = [self.choices[name] for name in names if name in self.choices]
        return [choices[i] for choices in found for i in sorted(choices)]


def put(kept: OrderedDict[str, T], key: str, value: T) -> None:
    """Put in a value as the latest; the oldest goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT_SUMMARIES:
        kept.popitem(last=False)


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
    app.add_api_route("/witcert/requests/{request_id:path}", request, methods=["GET"])
    return app


def around_process_outputs(
    original: Callable[..., Any], processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the summaries that arrive with outputs, and let an answer carry those of all its choices."""
    for output in engine_core_outputs:
        state = processor.request_states.get(output.request_id)
        if state is None:
            continue
        parent, params = state.parent_req, output.kv_transfer_params
        answer = state.external_req_id if parent is None else parent.external_req_id
        STATE.expect(output.request_id, answer, parent, state.request_index)
        if params is not None and META_KEY in params:
            params[META_KEY] = STATE.keep(output.request_id, params[META_KEY])
    return original(processor, engine_core_outputs, *args, **kwargs)
