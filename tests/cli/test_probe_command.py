"""`witcert probe` against an HTTP server of this process: what is sent, shown and refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from report_batches import batch

from witcert_core.cli import main, probe
from witcert_core.probes.board import ProbeBoard


class Handler(BaseHTTPRequestHandler):
    """A board that sees a row whenever it is asked; it wants a key."""

    board: ProbeBoard
    asked: list[str]

    def log_message(self, *_args: Any) -> None:
        pass

    def answer(self, status: int, found: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def do_POST(self) -> None:
        self.asked.append("POST")
        if self.headers["Authorization"] != "Bearer key":
            return self.answer(401, {"error": "Unauthorized"})
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["probe"]
        if text == "max(":
            return self.answer(400, {"error": "probe, column 5: the end cannot stand here", "column": 5})
        self.board.command({"do": "enable", "id": "p", "text": text})
        return self.answer(201, self.board.shown()[0])

    def do_GET(self) -> None:
        self.asked.append("GET")
        cells = batch([[0.25, 0.5]])
        self.board.observe(["p"], {"request": "r", "position": 1, "step": 1}, {0: (cells, 0)}, {1: "graph"})
        if len(self.asked) > 2:
            self.board.end("p", "rows")
        self.answer(200, self.board.shown()[0])

    def do_DELETE(self) -> None:
        self.asked.append("DELETE")
        self.answer(200, self.board.shown()[0])


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("WITCERT_API_KEY", "key")
    monkeypatch.setattr(probe, "POLL_SECONDS", 0.0)
    Handler.board, Handler.asked = ProbeBoard(2), []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_probe_is_shown_when_it_has_ended(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url, "quantize(bound) by layer"]) == 0
    assert Handler.asked == ["POST", "GET", "GET", "DELETE"]
    shown = capsys.readouterr().out
    for part in (
        "quantize(bound) by layer",
        "2^-2",
        "2^-1",
        "2 rows; 4 cells measured; 4 unknown (graph); ended: rows",
    ):
        assert part in shown


def test_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url, "max(bound)", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == [{"by": {}, "cells": 4, "max": 0.5}]


def test_refusals_are_one_line(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["probe", url, "max("]) == 2
    assert "probe, column 5: the end cannot stand here" in capsys.readouterr().err
    monkeypatch.setenv("WITCERT_API_KEY", "wrong")
    assert main(["probe", url, "count()"]) == 2
    assert "set WITCERT_API_KEY" in capsys.readouterr().err
    for nowhere in ("http://127.0.0.1:9", "no url"):
        assert main(["probe", nowhere, "count()"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{nowhere}: cannot be asked: " in line
