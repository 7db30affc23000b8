"""What an HTTP client may ask a metered server for: the summaries of the latest requests, and what is metered.

Nothing here grows with what clients send: summaries are kept as JSON, the oldest go first, by number and by bytes;
an id longer than `LONGEST_ID` is neither kept nor looked up, and no answer is larger than `LARGEST_ANSWER`. A summary
is found by the whole id of its request or of its answer, never by a part of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from witcert_core.policy.model import Policy
from witcert_core.serving.totals import Totals

META_KEY = "witcert"
KEPT_SUMMARIES = 4096
KEPT_BYTES = 64 << 20
LONGEST_ID = 512
"""Characters of an id; clients choose some of them."""
LARGEST_ANSWER = 16 << 20
"""Bytes of JSON in one answer of `/witcert/requests/{id}`."""
STATUS_SECONDS = 1.0

STATUS_ROUTE = "/witcert/status"
POLICY_ROUTE = "/witcert/policy"
SUMMARY_ROUTE = "/witcert/summary"
REQUEST_ROUTE = "/witcert/requests/{request_id:path}"

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: its status code and its body, which is JSON."""

    status: int
    body: bytes


@dataclass
class Answer:
    """The requests of the engine that one answer to a client is made of, each with its place among them."""

    places: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, request_id: str, *place: int) -> None:
        self.places[request_id] = place

    @property
    def request_ids(self) -> list[str]:
        """In the order of their places."""
        return sorted(self.places, key=self.places.__getitem__)


class SummaryStore:
    """Summaries by request id, and the answers that requests belong to by the answer's id.

    most, most_bytes: how many summaries are kept, and how many bytes of JSON with their ids. totals: of every request
    that finished, which whoever hears of it once adds to.
    """

    def __init__(self, most: int = KEPT_SUMMARIES, most_bytes: int = KEPT_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.totals = Totals()
        self.bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._answers: OrderedDict[str, tuple[Answer, int]] = OrderedDict()  # with its requests when it was put here
        self._parts = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, summary: dict[str, Any]) -> None:
        """Keep the summary of a request as the latest; one under the same id is replaced."""
        if len(request_id) > LONGEST_ID:
            return
        self._drop(request_id)
        self._kept[request_id] = json.dumps(summary).encode()
        self.bytes += self._cost(request_id)
        if self._cost(request_id) > self.most_bytes:  # it must not take all others with it
            self._drop(request_id)
        while len(self._kept) > self.most or self.bytes > self.most_bytes:
            self._drop(next(iter(self._kept)))

    def answer(self, answer_id: str, answer: Answer) -> None:
        """Let an answer be found by its id, again after each request added to it; one under the same id is replaced.

        The oldest go when there are more answers than summaries, or requests of answers than twice as many.
        """
        if len(answer_id) > LONGEST_ID:
            return
        self._parts -= self._answers.pop(answer_id, (answer, 0))[1]
        self._answers[answer_id] = answer, len(answer.places)
        self._parts += len(answer.places)
        while len(self._answers) > self.most or self._parts > 2 * self.most:
            self._parts -= self._answers.popitem(last=False)[1][1]

    def summary(self, request_id: str) -> dict[str, Any] | None:
        """The summary of one request of the engine."""
        found: dict[str, Any] | None = json.loads(self._kept[request_id]) if request_id in self._kept else None
        return found

    def reply(self, name: str, choice: int | None = None) -> Reply:
        """What `/witcert/requests/{name}` answers: a summary, or a list where the answer was made of several requests.

        choice: which of them alone, from 0.
        """
        if len(name) > LONGEST_ID:
            return refusal(414, f"the id has {len(name)} characters; at most {LONGEST_ID} are looked up")
        ids = [name] if name in self._kept else self._answers.get(name, (Answer(), 0))[0].request_ids
        found = [self._kept[request_id] for request_id in ids if request_id in self._kept]
        if not found:
            return refusal(
                404,
                f"no summary for request {name!r}: it is unknown, not finished, or older than the last {self.most} "
                f"requests ({self.most_bytes >> 20} MiB of summaries)",
            )
        if choice is not None:
            if not 0 <= choice < len(found):
                return refusal(404, f"choice {choice} of request {name!r}: there are {len(found)}, counted from 0")
            found = [found[choice]]
        total = sum(map(len, found))
        if total > LARGEST_ANSWER:
            return refusal(
                413,
                f"the {len(found)} summaries of request {name!r} have {total} bytes, more than {LARGEST_ANSWER}; ask "
                "for one at a time with ?choice=0, ?choice=1, ...",
            )
        return Reply(200, found[0] if len(found) == 1 else b"[" + b", ".join(found) + b"]")

    def _drop(self, request_id: str) -> None:
        if request_id in self._kept:
            self.bytes -= self._cost(request_id)
            del self._kept[request_id]

    def _cost(self, request_id: str) -> int:
        return len(request_id.encode(errors="surrogatepass")) + len(self._kept[request_id])


def refusal(status: int, message: str) -> Reply:
    """An error of one line."""
    return Reply(status, json.dumps({"error": message}).encode())


class Shared(Generic[T]):
    """One call for everybody who asks while it runs or within `seconds` of its end; a failed one is not kept."""

    def __init__(self, call: Callable[[], Awaitable[T]], seconds: float = STATUS_SECONDS) -> None:
        self._call = call
        self._seconds = seconds
        self._running: asyncio.Future[T] | None = None
        self._found: tuple[float, T] | None = None

    async def get(self) -> T:
        if self._found is not None and time.monotonic() - self._found[0] < self._seconds:
            return self._found[1]
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._ask())
        # A client that leaves must not take the call away from the others.
        return await asyncio.shield(self._running)

    async def _ask(self) -> T:
        result = await self._call()
        self._found = (time.monotonic(), result)
        return result


def add_routes(
    app: Any,
    summaries: SummaryStore,
    status: Callable[[], Awaitable[dict[str, Any]]],
    policy: Policy,
    mark: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda handler: handler,
    **options: Any,
) -> None:
    """Add the routes that only read to an engine's application, which is FastAPI's.

    status: what `/witcert/status` answers. mark: what the engine marks its own handlers with. options: of all routes,
    as `add_api_route` takes them.
    """
    from starlette.responses import JSONResponse, Response

    async def show_status() -> Any:
        return JSONResponse(await status())

    async def show_request(request_id: str, choice: int | None = None) -> Any:
        reply = summaries.reply(request_id, choice)
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    async def show_policy() -> Any:
        return JSONResponse(policy.model_dump(mode="json"))

    async def show_summary() -> Any:
        if policy.report.per_request:
            return JSONResponse(summaries.totals.as_dict())
        reply = refusal(404, "summaries do not reach this process; set report.per_request: true in the policy")
        return Response(reply.body, status_code=reply.status, media_type="application/json")

    for path, handler in (
        (STATUS_ROUTE, show_status),
        (REQUEST_ROUTE, show_request),
        (POLICY_ROUTE, show_policy),
        (SUMMARY_ROUTE, show_summary),
    ):
        app.add_api_route(path, mark(handler), methods=["GET"], response_model=None, **options)
