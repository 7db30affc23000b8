"""The page of a run: its numbers are those of the records, it loads nothing, and people can read it in any browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright
from plugin_serving import LAYERS, MiniEngine, Served

from witcert_core.cli import main
from witcert_core.report.page.pictures import by_step, heat_map
from witcert_core.report.page.render import render_page
from witcert_core.report.page.run import MOST_STEPS, MOST_WORDS, WORST_REQUESTS, Run, Steps, Words, read_run, worse
from witcert_core.report.page.words import alarm, figures, sentences

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def serve(path: Path, quantizer: str, cells: str = "all", audit_every: int = 0) -> Path:
    """The records of four requests; its outputs are zeros, so that every audit says that it attends otherwise."""
    meter = {"stride": 2, "audit_every": audit_every, "max_rows": 2}
    engine = MiniEngine(quantizer, metered=False, meter=meter, report={"jsonl": str(path), "cells": cells})
    for seed in range(1, 5):
        request = Served(engine, seed)
        engine.step({request: 20 + seed})
        for _ in range(9):
            engine.step({request: 1}).count(engine.runtime.ledger, {0})
        engine.runtime.finish(request.name, "stop")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    work = tmp_path_factory.mktemp("runs")
    return serve(work / "dithered.jsonl", "int8_dither"), serve(work / "groups.jsonl", "int4_token_group", "none")


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    read = map(json.loads, path.read_text().splitlines())
    return [data for data in read if data["schema"] == f"witcert.{kind}/1"]


def test_a_run_is_the_sum_of_its_records(files: tuple[Path, Path]) -> None:
    run, requests, cells = read_run(files[0]), records(files[0], "request"), records(files[0], "cell")
    assert (run.requests, run.malformed, run.violations) == (4, 0, 0)
    for name in ("cells_measured", "cells_unknown", "tv_certified_cells", "rows_seen"):
        assert run.sums[name] == sum(record[name] for record in requests) > 0
    assert run.forms.total() == run.sums["cells_measured"]
    assert run.unknown.total() == run.sums["cells_unknown"]
    for layer in range(LAYERS):
        for head, mark in enumerate(run.grid[layer]):
            assert mark == max(record["worst_by_layer_head"][layer][head] for record in requests)
    measured = [cell for cell in cells if cell["status"] == "measured"]
    assert run.cells == len(measured) > 0
    for step in {cell["step"] for cell in measured}:
        found = sorted(cell["meter"] for cell in measured if cell["step"] == step)
        assert run.steps.worst[step - 1] == found[-1]
        half = run.steps.upper(step - 1, 0.5)
        assert half is not None
        assert found[(len(found) - 1) // 2] <= half <= found[-1]
    page = render_page([run])
    assert all(f"<td>{record['risk']:.2f}</td>" in page for record in requests)
    bounds = [row["worst"]["meter"] for row in run.worst]
    assert bounds == sorted((record["worst"]["meter"] for record in requests), reverse=True)


def test_numbers_are_rounded_against_us_and_unknown_is_said(files: tuple[Path, Path]) -> None:
    run = read_run(files[0])
    counts = {"cells_measured": 10_000, "tv_certified_cells": 9_999, "cells_unknown": 1, "cells_exact": 0}
    for name, count in counts.items():
        run.sums[name] = count
    said = " ".join(sentences(run))
    assert "99.9 % of the 10,000 measured cells are certified" in said
    assert "0.1 % of all cells are unknown" in said
    assert "No cell was compared with exact attention" in said
    shown = {name: values for name, values, _ in figures([run])}
    worst = max(mark for row in run.grid for mark in row if isinstance(mark, float))
    assert float(shown["Worst bound"][0]) >= worst
    assert worse(None, "exact") == worse("exact", None) == "exact"
    assert worse(0.0, "exact") == worse("exact", 0.0) == worse(None, 0.0) == 0.0
    assert worse(0.5, 0.25) == 0.5


def test_a_broken_bound_is_the_first_thing_on_the_page(tmp_path: Path) -> None:
    run = read_run(serve(tmp_path / "run.jsonl", "int4_token_group", audit_every=1))
    assert run.violations > 0
    assert "Nothing on this page can be trusted" in alarm(run)
    page = render_page([run])
    assert page.index('role="alert"') < page.index("measured cells are certified")


def test_memory_is_bounded_by_the_model() -> None:
    steps = Steps()
    for step in range(1, 5000):
        steps.add(step, 0.9 if step == 4321 else 0.004)
    assert len(steps.bars) <= MOST_STEPS
    assert sum(map(sum, steps.bars)) == 4999
    assert steps.worst[4320 // steps.width] == 0.9
    assert {steps.upper(i, 0.5) for i in range(len(steps.bars)) if steps.worst[i] < 0.9} == {0.004}
    assert steps.upper(4320 // steps.width, 0.5) == 0.005  # the edge of its bucket
    words = Words()
    for number in range(3 * MOST_WORDS):
        words.add(str(number))
    assert len(words) == MOST_WORDS + 1
    assert words.total() == 3 * MOST_WORDS


def test_only_the_worst_requests_are_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    lines, request = [], records(files[0], "request")[0]
    for number in range(100):
        worst = {**request["worst"], "meter": (37 * number % 100) / 100}
        lines.append(json.dumps({**request, "request_id": f"r{number}", "worst": worst}))
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(lines))
    kept = [row["worst"]["meter"] for row in read_run(path).worst]
    assert kept == [(99 - i) / 100 for i in range(WORST_REQUESTS)]


def test_lines_that_cannot_be_read_are_counted_and_the_first_is_named(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (request, *_) = records(files[1], "request")
    other_model = {**request, "worst_by_layer_head": [[0.5]]}
    broken = {key: value for key, value in request.items() if key != "audit"}
    path = tmp_path / "run.jsonl"
    wrapped = {"prompt": "p", "answer": "a", "summary": request}  # of `witcert meter --json`
    lines = [json.dumps(line) for line in (request, {"schema": "other/1"}, broken, other_model, wrapped)]
    path.write_text("\n".join([*lines, "{torn", "7", "\n"]))
    run = read_run(path)
    assert (run.requests, run.malformed, run.first_malformed) == (2, 4, "line 3: has no 'audit'")
    assert "4 lines of the file could not be read (line 3: has no 'audit')" in " ".join(sentences(run))
    out = tmp_path / "page.html"
    path.write_text("{torn\n")
    for asked, why in (
        ([str(path)], "holds no request's summary"),
        (["/nowhere/run"], "/nowhere/run: cannot be read: No such file"),
        ([str(files[0]), "--status", str(path)], "is not JSON"),
        ([str(files[0]), "--policy", "/nowhere/policy"], "/nowhere/policy: cannot be read"),
        ([str(files[0]), "-o", "/nowhere/page"], "/nowhere/page: cannot be read or written"),
    ):
        assert main(["report", "-o", str(out), *asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert why in line
    assert not out.exists()


def test_what_a_client_chose_is_text_on_the_page(files: tuple[Path, Path]) -> None:
    (request, *_) = records(files[0], "request")
    name = "<script>alert(1)</script>"
    run = Run(name)
    run.add({**request, "request_id": name, "finish_reason": name, "quantizer": name})
    page = render_page([run, run], policy=name, status={name: name})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    for picture in (heat_map(run), by_step(run)):
        assert "<script" not in picture


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        why = "no Chromium on this machine; as root `make browser` installs Debian's"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    work = tmp_path_factory.mktemp("pages")
    one, two = work / "one.html", work / "two.html"
    assert main(["report", str(files[0]), "-o", str(one)]) == 0
    policy, status = work / "policy.yaml", work / "status.json"
    policy.write_text("version: 1\nquantizer: {name: int8_dither}\n")
    status.write_text(json.dumps(MiniEngine("int8_dither").runtime.status()))
    told = ["--policy", str(policy), "--status", str(status)]
    assert main(["report", str(files[0]), str(files[1]), "-o", str(two), *told]) == 0
    said = two.read_text()
    for name in ("witcert", "torch"):
        assert re.search(rf"version of {name}</th><td[^>]*>{re.escape(version(name))}<", said)
    assert "quantizer: {name: int8_dither}" in said
    return [one, two]


def note(into: list[str], name: str, event: Any) -> None:
    into.append(getattr(event, name))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
def test_it_can_be_read_on_a_phone_and_in_the_dark(
    browser: Browser, pages: list[Path], scheme: Any, width: int, height: int
) -> None:
    for path in pages:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        told: list[str] = []
        asked: list[str] = []
        page.on("console", partial(note, told, "text"))
        page.on("request", partial(note, asked, "url"))
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
        assert len(page.screenshot(full_page=True)) > 20_000
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert (told, asked) == ([], [path.as_uri()])
        page.close()


def test_it_can_be_printed_and_walked_through_by_keyboard(browser: Browser, pages: list[Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page.goto(pages[1].as_uri())
    reached, active = set(), "document.activeElement"
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"{active}.getAttribute('aria-label') || {active}.innerText"))
    assert {"Figures", "Map of dithered.jsonl", "Worst requests of groups.jsonl"} <= reached
    assert {"In plain words", "Policy and versions", "The same as a table, by layer"} <= reached
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert Axe().run(page).violations_count == 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
