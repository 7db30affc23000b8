"""Probes as HTTP clients enable them, against the board of a ledger in the place of an engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from witcert_core.probes.board import ProbeBoard
from witcert_core.probes.watches import Command
from witcert_core.serving.control import MAX_PROBES, Probes
from witcert_core.serving.http import Reply


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.board = ProbeBoard(2)
        self.told: list[Command] = []

    async def tell(self, command: Command | None) -> list[dict[str, Any]]:
        if command is not None:
            self.told.append(command)
            self.board.command(command)
        return self.board.shown()


def body(text: object) -> bytes:
    return json.dumps({"probe": text}).encode()


def read(reply: Reply) -> Any:
    return json.loads(reply.body)


def test_a_probe_from_its_text_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()

    async def run() -> None:
        probes = Probes(engine.tell, ("prompt",), allowed=True)
        enabled = await probes.enable(body('count() where request == "é\\n" for 1 seconds'))
        assert enabled.status == 201
        name = read(enabled)["id"]
        assert (await probes.show()).status == 200
        assert read(await probes.show(name))["ended"] is None
        told = await probes.end(name)
        assert read(told)["ended"] == "told to"
        assert (await probes.show(name)).status == (await probes.end(name)).status == 404

    asyncio.run(run())
    assert [command["do"] for command in engine.told] == ["enable", "end", "forget"]
    enabled, ended = capsys.readouterr().err.splitlines()  # whatever is in its text: a line for each change
    assert " enabled, sha256 " in enabled
    assert " ended, sha256 " in ended


def test_a_probe_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    waited: list[float] = []

    async def at_once(seconds: float) -> None:
        waited.append(seconds)

    async def run() -> None:
        probes = Probes(engine.tell, (), allowed=True)
        await probes.enable(body("count() for 30 seconds"))
        await asyncio.gather(*probes._timers)

    monkeypatch.setattr("witcert_core.serving.control.asyncio.sleep", at_once)
    asyncio.run(run())
    assert waited == [30]
    assert [shown["ended"] for shown in engine.board.shown()] == ["seconds"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"", 400),
        (b"\xff", 400),
        (b"[]", 400),
        (b'{"probe": 1}', 400),
        (b'{"probe": "count()", "more": 1}', 400),
        (body("count() where lora == 1"), 400),
        (body("x" * 20000), 413),
    ],
)
def test_what_is_no_probe_reaches_no_engine(given: bytes, status: int) -> None:
    engine = Engine()
    reply = asyncio.run(Probes(engine.tell, (), allowed=True).enable(given))
    assert (reply.status, engine.told) == (status, [])
    assert "\n" not in read(reply)["error"]


def test_so_many_probes_and_no_more() -> None:
    async def run() -> list[int]:
        probes = Probes(Engine().tell, (), allowed=True)
        return [(await probes.enable(body("count()"))).status for _ in range(MAX_PROBES + 1)]

    assert asyncio.run(run()) == [201] * MAX_PROBES + [409]


def test_nothing_is_shown_or_changed_unless_the_policy_says_so() -> None:
    engine = Engine()

    async def run() -> list[int]:
        probes = Probes(engine.tell, (), allowed=False)
        replies = [await probes.enable(body("count()")), await probes.show(), await probes.end("0" * 16)]
        return [reply.status for reply in replies]

    assert asyncio.run(run()) == [403, 403, 403]
    assert engine.told == []
