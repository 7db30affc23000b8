"""Who may ask, on vLLM's own application: keys from the environment, several of them, none, behind a proxy's prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from report_batches import batch
from starlette.testclient import TestClient
from vllm.entrypoints.launchers import app as launcher
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from witcert_vllm import http, installation

from witcert_core import Policy, RequestLedger
from witcert_core.serving import SummaryStore

pytestmark = pytest.mark.vllm


class CountingEngine:
    """Stands where the engine is, and counts what is asked of it."""

    calls = 0

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        if name == "witcert_probes":
            return []
        self.calls += 1
        return [{"asked": name}]


@contextmanager
def application(
    monkeypatch: pytest.MonkeyPatch, *options: str, control: bool = True
) -> Iterator[tuple[TestClient, CountingEngine]]:
    """vLLM's application as `vllm serve` builds it, with our routes."""
    original, engine = launcher.init_entrypoints_middleware, CountingEngine()
    with monkeypatch.context() as patched:
        patched.setattr(
            launcher,
            "init_entrypoints_middleware",
            lambda *args, **kwargs: http.around_init_middleware(original, *args, **kwargs),
        )
        policy = Policy(version=1, quantizer={"name": "none"}, report={"control": control})
        patched.setattr(installation, "_current", policy)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *options])
        app = launcher.build_app(args, ("generate",), None)
        app.state.engine_client = engine
        yield TestClient(app), engine


def codes(client: TestClient, key: str | None, prefix: str = "") -> list[int]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return [client.get(prefix + p, headers=headers).status_code for p in ("/witcert/status", "/witcert/requests/x")]


def test_the_key_is_the_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with application(monkeypatch) as (client, _):
        assert codes(client, None) == codes(client, "any") == [200, 404]
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    with application(monkeypatch) as (client, _):
        assert codes(client, None) == codes(client, "wrong") == [401, 401]
        assert codes(client, "from the environment") == [200, 404]
    with application(monkeypatch, "--api-key", "one", "two", "--root-path", "/proxied") as (client, engine):
        for prefix in ("", "/proxied"):
            for refused in (None, "from the environment", "on", "one two", ""):
                assert codes(client, refused, prefix) == [401, 401]
            assert codes(client, "one", prefix) == codes(client, "two", prefix) == [200, 404]
        assert client.get("/witcert/requests/x?choice=none").status_code == 401  # the key is asked for first
        assert engine.calls == 1


def test_the_status_is_asked_of_the_workers_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with application(monkeypatch) as (client, engine):
        assert [client.get("/witcert/status").json() for _ in range(20)] == [{"asked": "witcert_status"}] * 20
        assert engine.calls < 20


def test_probes_are_for_those_with_the_key_where_the_policy_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"json": {"probe": "count("}}
    with application(monkeypatch, "--api-key", "one") as (client, _):
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/x"), ("DELETE", "/x")):
            assert client.request(method, f"/witcert/probes{path}").status_code == 401
        client.headers["Authorization"] = "Bearer one"
        assert client.get("/witcert/probes").json() == []
        refused = client.post("/witcert/probes", **asked)
        assert (refused.status_code, refused.json()["column"]) == (400, 7)
        assert client.get("/witcert/probes/x").status_code == client.delete("/witcert/probes/x").status_code == 404
    with application(monkeypatch, control=False) as (client, _):
        assert client.get("/witcert/probes").status_code == 403
        assert client.post("/witcert/probes", **asked).status_code == 403


def test_the_policy_and_the_totals_are_shown_to_those_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.STATE, "summaries", SummaryStore())
    book = RequestLedger(Policy(version=1, quantizer={"name": "none"}), "vllm", 2, 2)
    for rid, bound in (("a", 0.25), ("b", 0.5)):
        book.observe(rid, 1, 1, 7, batch([[0.125, bound]]), 0)
        http.STATE.summaries.totals.add(book.finish(rid, "stop"))
    with application(monkeypatch, "--api-key", "one") as (client, _):
        for path in ("policy", "summary"):
            assert client.get(f"/witcert/{path}").status_code == 401
        client.headers["Authorization"] = "Bearer one"
        assert client.get("/witcert/policy").json()["report"]["control"] is True
        found = client.get("/witcert/summary").json()
        assert (found["requests"], found["rows_metered"], found["cells_measured"]) == (2, 2, 4)
        assert (found["worst"], found["worst_by_layer"]) == (0.5, [None, 0.5])
        assert sum(found["unknown_reasons"].values()) == found["cells_unknown"] == 4
        assert "request_id" not in found
