"""Drift from the exact cache, against laws made by hand and against greedy decoding itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from witcert_demo.tasks import make_samples

from witcert_core.cli import main
from witcert_core.errors import InputError
from witcert_core.evaluate.drift import answers, compare_laws, drift, drift_rows, windows
from witcert_core.evaluate.drift_served import Scored, coarse_kl, compare_likeliest
from witcert_core.evaluate.forcing import measuring_policy
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.settings import parse_quantizer

OPTIONS = {"resamples": 200, "seed": 0}
PROMPTS = [sample.prompt for sample in make_samples("multi_query", 256, 4, seed=5)]
EXACT, FP8 = parse_quantizer("none"), parse_quantizer("fp8_e4m3_cast")


def law(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_two_laws_are_compared_token_by_token_from_the_second_on() -> None:
    exact = law((0.9, 0.1), (0.5, 0.5), (0.75, 0.25), (0.75, 0.25))
    other = law((0.1, 0.9), (0.5, 0.5), (0.75, 0.25), (0.25, 0.75))
    found = compare_laws(exact, other, [0, 1, 0, 1])
    kl = 0.5 * math.log(3)  # 0.75 log(0.75 / 0.25) + 0.25 log(0.25 / 0.75)
    assert found["kl"] == pytest.approx(kl / 3)
    assert found["kl_max"] == pytest.approx(kl)
    assert found["top1"] == pytest.approx(2 / 3)
    assert found["first_change"] == 3
    assert found["nll"] == pytest.approx(-(math.log(0.5) + math.log(0.75) + math.log(0.75)) / 3)
    assert compare_laws(exact, exact, [0, 1, 0, 1])["first_change"] is None


def test_texts_part_where_greedy_decoding_parts(twin: LoadedModel) -> None:
    texts = answers(twin, PROMPTS, "prompts", 12, EXACT)
    found = drift(twin, [EXACT, FP8], texts, OPTIONS)["quantizers"]
    none, fp8 = found["none"], found["fp8_e4m3_cast"]
    assert (none["kl_max"], none["top1"]["value"], none["unchanged"]["value"]) == (0.0, 1.0, 1.0)
    assert none["nll_increase"]["value"] == 0.0
    engine = OfflineEngine(twin, measuring_policy(FP8), 300)
    parted = []
    for number, sample in enumerate(texts.samples):
        own = engine.generate(f"r{number}", sample.prompt, 12).ids
        same = [a == b for a, b in zip(own, sample.answer, strict=False)]
        parted.append(same.index(False) if False in same else None)
    assert [row["first_change"] for row in fp8["samples"]] == parted
    assert any(place is not None for place in parted)
    assert fp8["kl"]["value"] > 0.1
    assert all(row["meter"]["cells_measured"] > 0 for row in fp8["samples"])


def test_windows_are_whole_and_spread_over_the_text(original: LoadedModel) -> None:
    text = " ".join(PROMPTS)
    ids = original.answer_ids(text)
    found = windows(original.tokenizer, text, "a text", count=3, context=20, tokens=12).samples
    assert [len(s.prompt) - len(original.prompt_ids("")) for s in found] == [20] * 3
    whole = [s.prompt[-20:] + s.answer for s in found]
    fitting = len(ids) // 32
    assert whole == [ids[32 * at : 32 * at + 32] for at in (0, fitting // 3, 2 * fitting // 3)]
    assert len(windows(original.tokenizer, text, "a text", count=10_000, context=20, tokens=12).samples) == fitting
    with pytest.raises(InputError, match=r"one window takes 1010; take a longer text"):
        windows(original.tokenizer, text[:300], "a text", count=1, context=10, tokens=1000)


def test_the_command_scores_a_text_and_answers_prompts(twin_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(PROMPTS))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ["eval", "drift", "--model", str(twin_path), "--quantizers", "int8_token_group,fp8_e4m3_cast"]
    sizes = ["--samples", "3", "--context", "60", "--tokens", "8"]
    assert main([*command, "--out", str(tmp_path / "text"), "--text", str(tmp_path / "text.txt"), *sizes]) == 0
    found = json.loads((tmp_path / "text" / "drift.json").read_text())
    assert (found["schema"], found["generated"], found["about"]["samples"]) == ("witcert.drift/1", False, 3)
    good, bad = (found["quantizers"][name] for name in ("int8_token_group", "fp8_e4m3_cast"))
    assert good["kl"]["value"] < bad["kl"]["value"]
    assert good["unchanged"] is None
    assert bad["nll"]["value"] == pytest.approx(found["exact"]["nll"]["value"] + bad["nll_increase"]["value"])
    out = tmp_path / "prompts"
    assert main([*command, "--out", str(out), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "8"]) == 0
    found = json.loads((out / "drift.json").read_text())
    assert found["generated"]
    assert (out / "drift.md").read_text().count("\n") == 2 + 3
    assert len(drift_rows(found)) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--text", "a", "--prompts", "b"], "--text and --prompts are both given"),
        (["--chat"], "--chat is for --prompts"),
        (["--text", "/nowhere/text"], "/nowhere/text: cannot be read"),
        (["--quantizers", ""], "no quantizer is named"),
        (["--url", "http://127.0.0.1:9"], "--quantizers says how a model is run"),
        (["--quantizers", "", "--url", "http://127.0.0.1:9"], "is a server running there?"),
    ],
)
def test_drift_refuses_in_one_line(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "drift", "--model", "nowhere", "--quantizers", "none", "--out", str(tmp_path)]
    assert main([*command, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_the_likeliest_tokens_never_give_more_than_the_whole_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for shift in (0.01, 0.3, 3.0):
        exact = torch.randn(1000, generator=generator, dtype=torch.float64) * 3
        laws = [torch.log_softmax(x, -1) for x in (exact, exact + shift * torch.randn(1000, generator=generator))]
        whole = float((laws[0].exp() * (laws[0] - laws[1])).sum())
        tops = [{int(i): float(law[i]) for i in law.topk(20).indices} for law in laws]
        assert 0 < coarse_kl(*tops) <= whole
        gaps.append(coarse_kl(*tops) / whole)
    assert max(gaps) > 0.3
    assert coarse_kl(tops[0], tops[0]) == 0.0


def test_laws_of_a_server_are_compared_from_the_second_token_on() -> None:
    near, far = {1: math.log(0.75), 2: math.log(0.25)}, {1: math.log(0.25), 2: math.log(0.75)}
    exact, found = Scored([1, 1, 2], [far, near, near], {}), Scored([1, 1, 2], [near, near, far], {})
    compared = compare_likeliest(exact, found)
    assert compared["kl_max"] == pytest.approx(0.5 * math.log(3))
    assert (compared["top1"], compared["first_change"], compared["tokens"]) == (0.5, 0, 3)
    assert compared["nll"] == pytest.approx(-math.log(0.75))
    assert exact.nll == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
