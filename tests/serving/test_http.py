"""What HTTP clients may ask for is bounded, and found by whole ids only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from witcert_core.serving.http import LARGEST_ANSWER, LONGEST_ID, Answer, Shared, SummaryStore


def asked(store: SummaryStore, name: str, choice: int | None = None) -> tuple[int, Any]:
    reply = store.reply(name, choice)
    return reply.status, json.loads(reply.body)


def test_a_summary_is_found_by_its_whole_id_only() -> None:
    store = SummaryStore()
    store.keep("cmpl-team-1", {"request_id": "cmpl-team-1"})
    store.keep("ключ/7", {"request_id": "ключ/7"})
    assert asked(store, "cmpl-team-1") == (200, {"request_id": "cmpl-team-1"})
    assert asked(store, "ключ/7") == (200, {"request_id": "ключ/7"})
    for near in ("", "cmpl", "cmpl-team", "cmpl-team-", "cmpl-team-1 ", "CMPL-TEAM-1", "cmpl-team-*", "%", "ключ"):
        status, body = asked(store, near)
        assert (status, repr(near) in body["error"]) == (404, True), near
        assert "\n" not in body["error"]


def test_an_answer_lists_its_requests_in_their_places() -> None:
    store, answer = SummaryStore(), Answer()
    for request_id, place in (("b", (0, 1)), ("c", (10, 0)), ("d", (2, 0)), ("a", (0, 0))):
        answer.add(request_id, *place)
        store.keep(request_id, {"request_id": request_id})
    store.answer("all", answer)
    assert [s["request_id"] for s in asked(store, "all")[1]] == ["a", "b", "d", "c"]
    assert asked(store, "all", 3) == (200, {"request_id": "c"})
    assert asked(store, "all", 4)[0] == asked(store, "all", -1)[0] == 404
    again = Answer()
    again.add("e")
    store.answer("all", again)  # an id that is used again speaks of its latest request alone, which is not finished
    assert asked(store, "all")[0] == 404


def test_what_is_kept_is_bounded_by_number_and_by_bytes() -> None:
    store = SummaryStore(most=3, most_bytes=1000)
    for i in range(5):
        store.keep(f"r{i}", {"i": i})
    assert [asked(store, f"r{i}")[0] for i in range(5)] == [404, 404, 200, 200, 200]
    store.keep("large", {"text": "x" * 980})
    assert [asked(store, name)[0] for name in ("r3", "r4", "large")] == [404, 404, 200]
    store.keep("large", {"text": "y"})
    store.keep("after", {})
    assert asked(store, "large") == (200, {"text": "y"})
    assert store.bytes == len('large{"text": "y"}') + len("after{}")
    store.keep("too large", {"text": "x" * 1000})
    assert [asked(store, name)[0] for name in ("after", "too large")] == [200, 404]
    for i in range(5):
        store.answer(f"answer{i}", Answer({f"r{i}": ()}))
    assert len(store._answers) == 3
    growing = Answer()
    for i in range(20):
        growing.add(f"part{i}", i)
        store.answer("growing", growing)
        assert store._parts == sum(parts for _, parts in store._answers.values()) <= 6


def test_a_very_long_id_is_neither_kept_nor_looked_up() -> None:
    store = SummaryStore()
    longest, longer = "i" * LONGEST_ID, "i" * (LONGEST_ID + 1)
    for name in (longest, longer):
        store.keep(name, {})
        store.answer(f"{name}!", Answer())
    assert (len(store), len(store._answers)) == (1, 0)
    assert asked(store, longest)[0] == 200
    status, body = asked(store, longer * 1000)
    assert (status, len(body["error"]) < 200) == (414, True)


def test_an_answer_that_is_too_large_is_given_in_parts() -> None:
    store, answer = SummaryStore(), Answer()
    for i in range(3):
        store.keep(f"r{i}", {"text": "x" * (LARGEST_ANSWER // 3)})
        answer.add(f"r{i}", i)
    store.answer("all", answer)
    status, body = asked(store, "all")
    assert status == 413
    assert "choice=0" in body["error"]
    assert [asked(store, "all", i)[0] for i in range(3)] == [200, 200, 200]


def test_a_call_is_shared_by_all_who_ask_at_once_and_kept_for_a_while() -> None:
    calls = 0

    async def call() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        if calls == 1:
            raise OSError("not yet")
        return calls

    async def ask() -> None:
        shared = Shared(call, seconds=3600)
        failed = await asyncio.gather(*(shared.get() for _ in range(5)), return_exceptions=True)
        assert {type(error) for error in failed} == {OSError}
        leaving = asyncio.ensure_future(shared.get())
        staying = [asyncio.ensure_future(shared.get()) for _ in range(5)]
        await asyncio.sleep(0)
        leaving.cancel()
        assert await asyncio.gather(*staying) == [2] * 5
        assert await shared.get() == 2
        shared._seconds = 0.0
        assert [await shared.get(), await shared.get()] == [3, 4]
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(ask())
