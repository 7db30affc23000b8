"""What HTTP clients get: `kv_transfer_params.witcert` on answers that are not streamed; the rest is asked for by id.

What a client knows its answer by is not what the engine calls its requests: a completion
of several prompts is a request a prompt, a response of several turns one a turn, several choices one a choice. vLLM's
handlers leave the answer's id in the state of the HTTP request (`RequestResponseMetadata`), and the engine takes
requests in within that HTTP request, so each is noted there as a part of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import Depends, HTTPException, Request

from witcert_core.serving import META_KEY, Answer, Command, Probes, Shared, SummaryStore, add_probe_routes, http
from witcert_vllm.installation import current

FACTS = ("lora", "prompt")
"""What `worker.facts_of` says of a request to probes; a worker does not know its priority."""
_METADATA = "request_metadata"  # where vLLM's handlers leave it
_ANSWER = "witcert_answer"
_asking: ContextVar[MutableMapping[str, Any] | None] = ContextVar("witcert_asking", default=None)
"""The state of the HTTP request in whose context this code runs."""


class MainState:
    """Summaries of the latest requests, and the choices of those that are still running."""

    def __init__(self) -> None:
        self.summaries = SummaryStore()
        # By vLLM's `ParentRequest`: clients choose ids and use them again, so an id alone does not say whose they are.
        self._choices: WeakKeyDictionary[Any, dict[int, dict[str, Any]]] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[Any, Answer] = WeakKeyDictionary()

    def expect(self, request_id: str, name: str, parent: Any, index: int) -> None:
        """Request `request_id` of the engine was taken in as choice `index` of what its client called `name`.

        parent: vLLM's `ParentRequest` of several choices, else None.
        """
        state = _asking.get()
        metadata = None if state is None else state.get(_METADATA)
        if state is not None and metadata is not None:
            answer_id, answer = metadata.request_id, state.setdefault(_ANSWER, Answer())
        else:
            answer_id, answer = name, Answer() if parent is None else self._answers.setdefault(parent, Answer())
        answer.add(request_id, number_after(answer_id, name), index)
        self.summaries.answer(answer_id, answer)

    def keep(self, request_id: str, summary: dict[str, Any], parent: Any, index: int) -> list[dict[str, Any]]:
        """Keep the summary of a choice; returns those of all choices of its request so far, in order."""
        self.summaries.keep(request_id, summary)
        if parent is None:
            return [summary]
        choices = self._choices.setdefault(parent, {})
        choices[index] = summary
        return [choices[i] for i in sorted(choices)]


def number_after(answer_id: str, name: str) -> int:
    """Which prompt or turn of an answer a request is: vLLM numbers them after its id, as `ID-2` or `ID_2`."""
    rest = name.removeprefix(answer_id)[1:]
    return int(rest) if name.startswith(answer_id) and rest.isascii() and rest.isdigit() else 0


STATE = MainState()


class NamesAnswers:
    """ASGI middleware: lets `STATE.expect` see the state of the HTTP request it is called in."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _asking.set(scope.setdefault("state", {}))
        await self.app(scope, receive, send)


def around_add_request(
    original: Callable[..., None],
    processor: Any,
    request: Any,
    prompt: str | None,
    parent_req: Any = None,
    request_index: int = 0,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Note which answer a request is a part of, in the context of the client that asked."""
    name = request.external_req_id if parent_req is None else parent_req.external_req_id
    STATE.expect(request.request_id, name or request.request_id, parent_req, request_index)
    original(processor, request, prompt, parent_req, request_index, *args, **kwargs)


def around_process_outputs(
    original: Callable[..., Any], processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the summaries that arrive with outputs, and let an answer carry those of all its choices."""
    for output in engine_core_outputs:
        state, params = processor.request_states.get(output.request_id), output.kv_transfer_params
        if state is not None and params is not None and META_KEY in params:
            index = state.request_index
            params[META_KEY] = STATE.keep(output.request_id, params[META_KEY], state.parent_req, index)
    return original(processor, engine_core_outputs, *args, **kwargs)


def around_init_middleware(original: Callable[..., None], args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
    """vLLM's application, when its guards stand and before it is closed, with our routes and the summaries."""
    original(args, app, *rest, **kwargs)
    add_routes(app)
    app.add_middleware(NamesAnswers)


def add_routes(app: Any) -> None:
    """Add `/witcert/status`, `/witcert/requests/{id}` and `/witcert/probes`, behind the keys of `app`; open without.

    vLLM asks for its key (`--api-key`, `VLLM_API_KEY`) on paths that begin with prefixes of its own, so these ask for
    it themselves, with the same keys and the same comparison.
    """
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    guards = [item for item in app.user_middleware if item.cls is AuthenticationMiddleware]
    tokens = [token for item in guards for token in item.kwargs["tokens"]]
    guard = AuthenticationMiddleware(app, tokens)

    async def check_key(raw_request: Request) -> None:
        if tokens and not guard.verify_token(raw_request.headers):
            raise HTTPException(401, "Unauthorized")

    async def ask_workers() -> dict[str, Any]:
        found: dict[str, Any] = (await app.state.engine_client.collective_rpc("witcert_status"))[0]
        return found

    async def tell_engine(command: Command | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await app.state.engine_client.collective_rpc("witcert_probes", args=(command,))
        return found

    guarded = [Depends(check_key)]
    policy = current()
    http.add_routes(app, STATE.summaries, Shared(ask_workers).get, policy, dependencies=guarded)
    add_probe_routes(app, Probes(tell_engine, FACTS, policy.report.control), dependencies=guarded)
