"""Who answers samples: transformers in this process, a server at an address, or a server started for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.extras import require
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.servers import bearer
from witcert_core.evaluate.settings import EXACT, Mode, QuantizerSpec, build_policy
from witcert_core.evaluate.tasks import EvalSample
from witcert_core.policy.model import Policy

TIMEOUT_S = 600.0
AWAY = (502, 503, 504)
"""What a proxy, or a server that starts, answers for one that is not there."""
KEY_VARIABLE = "WITCERT_API_KEY"
"""Environment variable with the key of a server that asks for one."""
OF_A_STATUS = ("backend", "pool_dtype", "storage", "layers_quantized", "prefill_reads", "tier", "stride", "gate")
"""Of `/witcert/status` what answers and counts depend on."""


class UnreachableError(InputError):
    """Nobody answers at an address; the same may be asked again later."""


@dataclass(frozen=True)
class Reply:
    """Text of an answer and the meter's summary, None from a server that is not metered."""

    text: str
    summary: Mapping[str, Any] | None


class Asker(Protocol):
    """One quantizer in one mode.

    settings: what its answers depend on beside these; records of other settings are not taken for its own.
    parallel: how many samples it may be asked at once.
    """

    quantizer: str
    mode: Mode
    engine: str
    settings: Mapping[str, Any]
    parallel: int

    def open(self) -> None:
        """Get ready; called once, before the first sample."""
        ...

    def ask(self, sample: EvalSample, request_id: str) -> Reply:
        """Greedy decoding."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class OfflineAsker:
    """`loaded` under a policy."""

    engine = "offline"
    parallel = 1

    def __init__(
        self, loaded: LoadedModel, base: Mapping[str, Any], spec: QuantizerSpec, mode: Mode, max_tokens: int
    ) -> None:
        self.quantizer = EXACT if mode == "exact" else spec.label
        self.mode: Mode = mode
        self._loaded = loaded
        self._policy = build_policy(base, spec, mode)  # refused now, not after hours
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        devices = sorted({parameter.device.type for parameter in loaded.model.parameters()})
        self.settings: Mapping[str, Any] = {
            "engine": self.engine,
            "dtype": dtype,
            **({} if devices == ["cpu"] else {"devices": devices}),
            **chatting(loaded.chat),
            **deciding(self._policy),
        }
        self._max_tokens = max_tokens
        self._running: OfflineEngine | None = None

    def open(self) -> None:
        self._running = OfflineEngine(self._loaded, self._policy, self._max_tokens)

    def close(self) -> None:
        self._running = None

    def ask(self, sample: EvalSample, request_id: str) -> Reply:
        if self._running is None:
            raise UnsupportedError("an asker that was not opened cannot be asked")
        ids = self._loaded.prompt_ids(sample.prompt)
        answer = self._running.generate(request_id, ids, sample.max_new_tokens)
        return Reply(answer.text, answer.summary)


class UrlAsker:
    """A running server with OpenAI's routes; what it meters is read from `/witcert/status`.

    chat: samples are what a user says; the server puts them into its model's chat template.
    """

    def __init__(self, url: str, parallel: int = 4, chat: bool = False) -> None:
        httpx = require("httpx")
        if not url.startswith(("http://", "https://")):
            raise InputError(f"url is {url!r}; write it with its scheme: http://HOST:PORT")
        self._errors = httpx.HTTPError
        self._refused = httpx.HTTPStatusError
        headers = bearer(os.environ.get(KEY_VARIABLE))
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S, headers=headers)
        self.url = url
        self.parallel = parallel
        self.chat = chat
        models = self._get("/v1/models").json()["data"]
        self.model: str = models[0]["id"]
        self.model_path: str = models[0].get("root") or self.model
        self.owner: str = models[0].get("owned_by") or ""
        self.status = self._status()
        self.engine = "url"  # a metered server says in each summary what it is
        gate = (self.status or {}).get("gate", "observe")
        self.quantizer: str = (self.status or {}).get("quantizer", EXACT)
        self.mode: Mode = "exact" if self.quantizer == EXACT else "raw" if gate == "observe" else "gated"
        known = {key: self.status[key] for key in OF_A_STATUS if key in self.status} if self.status else {}
        self.settings: Mapping[str, Any] = {"engine": self.engine, **chatting(chat), **known}

    def open(self) -> None:
        """The server is running already."""

    def close(self) -> None:
        self._client.close()

    def ask(self, sample: EvalSample, request_id: str) -> Reply:
        body = {
            "model": self.model,
            "max_tokens": sample.max_new_tokens,
            "temperature": 0,
        }
        asked = {"messages": [{"role": "user", "content": sample.prompt}]} if self.chat else {"prompt": sample.prompt}
        data = self.post(f"/v1/{'chat/' if self.chat else ''}completions", {**body, **asked}, request_id)
        summary = summary_of(data)
        if self.status is not None and summary is None:
            raise UnsupportedError(
                f"{self.url}: is metered but returned no summary; set report.per_request to true in its policy"
            )
        choice = data["choices"][0]
        return Reply(choice["message"]["content"] or "" if self.chat else choice["text"], summary)

    def post(self, route: str, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The answer of a route; where there is none UnreachableError, or UnsupportedError, which name the request."""
        try:
            response = self._client.post(route, json=body)
            response.raise_for_status()
        except self._refused as error:
            said = " ".join(error.response.text.split())[:300]
            kind = UnreachableError if error.response.status_code in AWAY else UnsupportedError
            raise kind(f"{self.url}: {request_id} was refused with {error.response.status_code}: {said}") from error
        except self._errors as error:
            raise UnreachableError(f"{self.url}: asking {request_id} failed: {error}") from error
        data: dict[str, Any] = response.json()
        return data

    def _get(self, route: str) -> Any:
        try:
            response = self._client.get(route)
            response.raise_for_status()
        except self._errors as error:
            if isinstance(error, self._refused) and error.response.status_code in (401, 403):
                raise InputError(
                    f"{self.url}{route}: {error.response.status_code}: the server asks for its key (--api-key); put it "
                    f"into {KEY_VARIABLE}"
                ) from error
            answered = isinstance(error, self._refused) and error.response.status_code not in AWAY
            kind = InputError if answered else UnreachableError
            raise kind(f"{self.url}{route}: {error}; is a server running there?") from error
        return response

    def _status(self) -> dict[str, Any] | None:
        """None from a server without the meter."""
        try:
            response = self._client.get("/witcert/status")
        except self._errors as error:
            raise UnreachableError(f"{self.url}/witcert/status: {error}") from error
        if response.status_code in (401, 403):
            raise InputError(f"{self.url}/witcert/status: {response.status_code} for the key in {KEY_VARIABLE}")
        return response.json() if response.status_code == 200 else None


def chatting(chat: bool) -> dict[str, bool]:
    """Of settings that answers depend on: whether samples were put into a chat template."""
    return {"chat": True} if chat else {}


def deciding(policy: Policy | None) -> dict[str, Any]:
    """Of a policy what answers and counts depend on: not what is reported, and where to."""
    if policy is None:
        return {"policy": None}
    sections = policy.model_dump(mode="json", exclude={"version", "report", "quantizer"})
    return {"policy": sections}


def summary_of(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of an answer's first choice: on its `metadata` (SGLang) or `kv_transfer_params` (vLLM)."""
    for place in ("metadata", "kv_transfer_params"):
        found = (answer.get(place) or {}).get("witcert")
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, dict):
            return first
    return None
