"""Traffic as the canary reads it: whole lines of files that grow and are replaced, and never more than the share."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from witcert_core.cli import main
from witcert_core.errors import InputError
from witcert_core.evaluate import traffic
from witcert_core.evaluate.canary import OWN, PENDING, Canary, CanaryRun
from witcert_core.evaluate.traffic import Draw, Follower, Ids, Line, LineError, every_of, parse_line

NOWHERE = "http://127.0.0.1:9"


def logged(event: str = "request.finished", out: object = None, **asked: object) -> bytes:
    """As `sglang.srt.utils.log_utils.log_json` writes it."""
    obj = {"text": "a question", "input_ids": [5, 6], "lora_path": None, "extra_key": None, **asked}
    data = {"timestamp": "2026-01-31T12:00:00", "event": event, "rid": "r1", "obj": obj}
    answer = {"text": "words", "output_ids": [7, 8, 9], "meta_info": {}} if out is None else out
    return f"[2026-01-31 12:00:00] {json.dumps({**data, 'out': answer})}".encode()


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b'{"prompt": "a b", "text": "c", "id": "x", "model": "m"}', Line("a b", "c", "x")),
        (b'{"prompt": [1, 2], "text": [3], "cache_salt": "s"}', Line(Ids([1, 2]), Ids([3]), "", {"cache_salt": "s"})),
        (b'{"messages": [{"role": "user", "content": "a"}]}', Line([{"role": "user", "content": "a"}])),
        (logged(), Line(Ids([5, 6]), Ids([7, 8, 9]), "r1")),
        (logged(input_ids=None, extra_key="e"), Line("a question", Ids([7, 8, 9]), "r1", {"extra_key": "e"})),
        (logged("request.received"), None),
        (b"[2026-01-31 12:00:00] The server is {ready}", None),
        (b"[1, 2]", None),
    ],
)
def test_lines_that_are_read(raw: bytes, line: Line | None) -> None:
    assert parse_line(raw) == line


@pytest.mark.parametrize(
    ("raw", "reason", "why"),
    [
        (b'{"prompt": "a', "not_json", "is not JSON"),
        (b"\xff\xfe", "not_json", "is not JSON"),
        (b'{"text": "a"}', "no_prompt", 'has no text .or token ids. under "prompt"'),
        (b'{"prompt": [1, -2]}', "no_prompt", "has no text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no_prompt", "has no text"),
        (b'{"prompt": "a", "text": 5}', "bad_text", "neither a text nor token ids"),
        (b'{"prompt": "a", "id": 5}', "bad_id", "is no text"),
        (b'{"prompt": "a", "cache_salt": 5}', "bad_cache_salt", "is no text"),
        (logged(out={"meta_info": {}}), "no_prompt", "--log-requests-level 3"),
        (logged(out={"output_ids": [1, "...", 2]}), "no_prompt", "no whole prompt"),
        (logged(image_data=["x"]), "not_text", "image_data"),
        (logged(lora_path="l"), "not_text", "lora_path"),
    ],
)
def test_lines_that_are_counted_and_named(raw: bytes, reason: str, why: str) -> None:
    with pytest.raises(LineError, match=why) as found:
        parse_line(raw)
    assert found.value.reason == reason


@pytest.mark.parametrize("share", [1.0, 0.7, 0.5, 0.03, 0.01, 1 / 49])
def test_at_no_moment_more_than_the_share_is_taken(share: float) -> None:
    draw, taken = Draw(share, seed=0), 0
    for seen in range(1, 1000):
        taken += draw.offer(Line(str(seen))) is not None
        assert taken <= share * seen
    assert taken == 999 // every_of(share)
    assert (every_of(share) - 1) * share < 1  # no fewer than can be


def test_each_request_of_a_block_is_as_likely() -> None:
    draw = Draw(0.25, seed=1)
    found = [draw.offer(Line(str(i % 4))) for i in range(16_000)]
    places = Counter(line.prompt for line in found if line is not None)
    assert sum(places.values()) == 4000
    assert all(abs(count - 1000) < 150 for count in places.values())  # five standard deviations
    with pytest.raises(InputError, match="share is 0; it must be above 0"):
        Draw(0)


def test_a_growing_file_is_followed_through_its_replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "LONGEST_LINE", 100)
    monkeypatch.setattr(traffic, "_BLOCK", 64)
    path = tmp_path / "traffic.jsonl"
    path.write_text("before\n")
    follower = Follower(path)

    def add(text: str) -> list[str]:
        with path.open("a") as file:
            file.write(text)
        return [line.decode() for line in follower.lines()]

    assert add("") == []
    assert add("one\n\ntwo\nhal") == ["one", "two"]
    assert add("f\n") == ["half"]
    assert add("x" * 1000) == []
    assert (add("end\nnext\n"), follower.too_long) == (["next"], 1)
    path.rename(tmp_path / "old")
    assert list(follower.lines()) == []
    assert add("new\n") == ["new"]
    path.write_text("a\n")  # cut in place
    assert list(follower.lines()) == [b"a"]
    follower.close()
    with pytest.raises(InputError, match=r"nowhere: cannot be read: No such file or directory; name a file"):
        Follower(tmp_path / "nowhere")


def test_what_waits_is_bounded_and_the_server_may_be_away(tmp_path: Path) -> None:
    path, said = tmp_path / "traffic.jsonl", list[str]()
    path.touch()
    run = CanaryRun(NOWHERE, path, tmp_path / "out", 0.5, "127.0.0.1", 1, None, False, 8, 64, 1e6)
    canary = Canary(run, said.append)
    lines = [json.dumps({"prompt": "a", "id": f"{OWN if i % 3 == 0 else ''}{i}"}) for i in range(60)]
    path.write_text("\n".join([*lines, "broken", "{}", "broken", ""]))
    canary.turn()
    canary.turn()
    value = canary.metrics.registry.get_sample_value
    name = "witcert_canary_"
    assert value(f"{name}requests_seen_total") == 40
    assert value(f"{name}requests_taken_total") == 20
    assert value(f"{name}requests_left_out_total", {"reason": "overtaken"}) == 20 - PENDING
    assert value(f"{name}lines_malformed_total", {"reason": "not_json"}) == 2
    assert value(f"{name}lines_malformed_total", {"reason": "no_prompt"}) == 1
    assert value(f"{name}server_up") == 0
    assert ["not JSON" in line for line in said] == [True, False, False]
    assert "is a server running there?; asked again" in said[-1]
    canary.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "--share is 0, and nothing is taken"),
        (["--share", "1.5"], "--share is 1.5"),
        (["--share", "0.1", "--traffic", "/nowhere/file"], "/nowhere/file: cannot be read"),
        (["--share", "0.1", "--out", "/nowhere/file"], "/nowhere/file cannot be opened for appending"),
        (["--share", "0.1", "--host", "192.0.2.1"], "no metrics can be served there"),
    ],
)
def test_the_command_refuses_in_one_line(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traffic").touch()
    command = ["canary", "--url", NOWHERE, "--traffic", str(tmp_path / "traffic"), "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
