"""`witcert meter` and `witcert eval ruler` as a person runs them, on the outlier twin."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from witcert_demo.run import CHECKPOINT
from witcert_demo.tasks import make_samples

from witcert_core.cli import main
from witcert_core.cli.eval import split
from witcert_core.errors import InputError, PolicyError, ReportError
from witcert_core.evaluate.askers import Reply
from witcert_core.evaluate.compare import compare
from witcert_core.evaluate.meter_run import read_prompts
from witcert_core.evaluate.records import RecordFile, SampleRecord, read_records
from witcert_core.evaluate.settings import QuantizerSpec, base_settings, build_policy, parse_quantizer
from witcert_core.policy.gate_registry import GATES
from witcert_core.policy.gates import GateDecision, GateState
from witcert_core.report.schema import load_schema

QUANTIZERS = "fp8_e4m3_cast,int4_token_group:group_size=32"
COMMON = ["--lengths", "128", "--samples", "2", "--tasks", "multi_key,multi_query", "--no-plot"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_meter_prints_the_engines_report(twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = make_samples("multi_key", 128, 2, 3)
    plain, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("\n".join(s.prompt for s in samples) + "\n")
    objects.write_text("\n".join(json.dumps({"prompt": s.prompt, "id": 1}) for s in samples))
    command = ["meter", "--model", str(twin_path), "--quantizer", "int8_dither", "--max-new-tokens", "8"]
    assert main([*command, "--prompts", str(plain)]) == 0
    text = capsys.readouterr().out
    assert text.count("worst bound by layer and query head") == 2
    assert text.count("none of 48 audited cells exceeded its bound") == 2
    assert main([*command, "--prompts", str(objects), "--json"]) == 0
    answered = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in answered] == [s.prompt for s in samples]
    assert all(one["answer"] in text for one in answered)
    for one in answered:
        jsonschema.validate(one["summary"], load_schema("request"))
    policy = tmp_path / "policy.yaml"
    policy.write_text("{version: 1, quantizer: {name: none}, meter: {stride: 2}}")
    assert main([*command, "--prompts", str(objects), "--json", "--policy", str(policy)]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])["summary"]
    assert (first["quantizer"], first["rows_seen"], first["rows_metered"]) == ("int8_dither", 3, 2)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("", [], "holds no prompt"),
        (" \n\r\n", [], "holds no prompt"),
        ("x", [], "neither --quantizer nor --policy"),
        ("x", ["--quantizer", "int5"], "unknown quantizer"),
        ("x", ["--quantizer", "int4_token_group:group_size"], "is no parameter"),
    ],
)
def test_meter_refuses_in_one_line(
    text: str, options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text(text)
    extra = options or (["--quantizer", "none"] if not text.strip() else [])
    assert main(["meter", "--model", "nowhere", "--prompts", str(prompts), *extra]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_prompt_the_model_cannot_take_is_one_line(
    twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    command = ["meter", "--model", str(twin_path), "--quantizer", "none", "--prompts", str(prompts)]
    prompts.write_text('{"prompt": ""}')
    assert main(command) == 2
    assert "prompt 1, '', has no tokens" in capsys.readouterr().err
    prompts.write_text('{"prompt": "%s"}' % ("key1 " * 3000))
    assert main(command) == 2
    assert "beyond the 2048 positions" in capsys.readouterr().err.splitlines()[-1]


def test_only_a_line_break_ends_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n{"prompt": "c\\fd"}\n'.encode())
    assert read_prompts(path) == ["a\u2028b", "c\x0cd"]


def test_records_that_were_spoiled_are_one_line(
    twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "ruler", "--model", str(twin_path), "--quantizers", "int8_dither", "--lengths", "128"]
    command += ["--samples", "1", "--out", str(tmp_path), "--no-plot"]
    for name, text in (("run.json", "{"), ("run.json", "[]"), ("samples.jsonl", "{}\n")):
        (tmp_path / name).write_text(text)
        assert main(command) == 2
        assert str(tmp_path / name) in capsys.readouterr().err.splitlines()[-1]
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "odd", [["--lengths", ""], ["--lengths", ","], ["--modes", ""], ["--seed", "-1"], ["--seed", str(2**63)]]
)
def test_lists_without_a_word_and_seeds_out_of_range_are_one_line(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "ruler", "--model", "m", "--quantizers", "none", "--out", str(tmp_path), *odd]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert odd[0] in line


@dataclass(frozen=True)
class BadGate:
    """Decides what a plugin might: nothing, or to repair one block for ever."""

    name: ClassVar[str] = "bad"
    repairs: ClassVar[bool] = True
    decision: ClassVar[Any] = None

    def decide(self, state: GateState) -> Any:
        return self.decision


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        (None, "gate 'bad' decided None; decide must return a GateDecision"),
        (GateDecision("repair", torch.zeros(1), 0), "wants block 0 of 1 repaired, which is exact already"),
        (GateDecision("repair", torch.zeros(1), 99), "wants block 99 of 1 repaired"),
    ],
)
def test_a_gate_that_decides_nonsense_is_one_line(
    decision: Any,
    why: str,
    twin_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(BadGate, "decision", decision)
    monkeypatch.setitem(GATES._classes, "bad", BadGate)
    (tmp_path / "p.yaml").write_text("{version: 1, quantizer: {name: int4_token_group}, gate: {kind: bad}}")
    (tmp_path / "p.txt").write_text("key1 is 23")
    command = ["meter", "--model", str(twin_path), "--policy", str(tmp_path / "p.yaml")]
    assert main([*command, "--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "3"]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def out(twin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two quantizers in all modes."""
    out = tmp_path_factory.mktemp("ruler")
    command = ["eval", "ruler", "--model", str(twin_path), "--quantizers", QUANTIZERS, "--out", str(out), *COMMON]
    assert main(command) == 0
    return out


def test_a_run_compares_the_quantizers(out: Path) -> None:
    records = lines(out / "samples.jsonl")
    assert len(records) == (1 + 2 + 2) * 4
    results = json.loads((out / "results.json").read_text())
    rows = {(row["quantizer"], row["mode"]): row for row in results["rows"]}
    exact, raw = rows["none", "exact"], rows["fp8_e4m3_cast", "raw"]
    gated = rows["fp8_e4m3_cast", "gated"]
    assert exact["score"]["value"] == gated["score"]["value"] == 1.0 > raw["score"]["value"]
    assert raw["minus_exact"]["value"] == raw["score"]["value"] - 1
    assert raw["zero_scores"] == round(4 * (1 - raw["score"]["value"])) == raw["ranking"]["log_a_max"]["lost"]
    assert gated["minus_raw"]["value"] == -raw["minus_exact"]["value"]
    assert gated["repairs"]["blocks_median"] > 0 < gated["repairs"]["bytes_total"]
    assert raw["repairs"] is None
    assert all(row["meter"]["violations"] == 0 < row["meter"]["audited"] for row in results["rows"])
    assert [cell["task"] for cell in raw["cells"]] == ["multi_key", "multi_query"]
    table = (out / "results.md").read_text()
    assert len(table.splitlines()) == 2 + 5


def test_what_was_asked_is_not_asked_again(
    out: Path, twin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "again"
    shutil.copytree(out, copy)
    kept = (copy / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "samples.jsonl").write_bytes(b"".join(kept[:-1]) + kept[-1][:25])  # killed while writing the last one
    asked: list[str] = []

    def answer(_self: object, sample: Any, request_id: str) -> Reply:
        asked.append(request_id)
        return Reply(sample.answer, None)

    monkeypatch.setattr("witcert_core.evaluate.askers.OfflineAsker.ask", answer)
    command = ["eval", "ruler", "--model", str(twin_path), "--quantizers", QUANTIZERS, "--out", str(copy), *COMMON]
    assert main(command) == 0
    last = json.loads(kept[-1])
    assert asked == ["/".join(str(last[k]) for k in ("quantizer", "mode", "task", "num_tokens", "index"))]
    assert len(lines(copy / "samples.jsonl")) == len(kept)


def test_runs_are_not_mixed(out: Path, twin_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "ruler", "--model", str(twin_path), "--modes", "exact", "--out", str(out), *COMMON]
    assert main([*command, "--seed", "1"]) == 2
    assert "holds a run with seed 0" in capsys.readouterr().err
    assert main([*command, "--stride", "2"]) == 2
    assert "holds samples of none exact with policy.meter.stride 1, this run has 2" in capsys.readouterr().err
    assert main([*command, "--dtype", "bfloat16"]) == 2
    assert "with dtype 'float32', this run has 'bfloat16'; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "neither --model nor --url"),
        (["--model", "x"], "no quantizer is named"),
        (["--model", "x", "--modes", "cooked"], "mode is 'cooked'"),
        (["--model", "x", "--quantizers", "none", "--lengths", "many"], "no number of tokens"),
        (["--url", "http://127.0.0.1:9", "--no-plot"], "is a server running there?"),
        (["--url", "127.0.0.1:9"], "write it with its scheme: http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9", "--quantizers", "none"], "--quantizers says how a model is run"),
        (["--url", "http://127.0.0.1:9", "--audit-every", "0"], "--audit-every says how a model is run"),
        (["--model", "x", "--quantizers", "none", "--server-options", "-x"], "add --engine sglang or --engine vllm"),
        (["--model", "x", "--server-options", "'x"], "is no list of options"),
        (["--model", "nowhere", "--quantizers", "none"], "no such directory, and as a hub id:"),
        (["--model", str(CHECKPOINT), "--quantizers", "none", "--lengths", "8"], "num_tokens is 8; allowed are 48.."),
        (["--model", str(CHECKPOINT), "--quantizers", "none", "--lengths", "4096"], "beyond the 2048 positions"),
        (["--model", str(CHECKPOINT), "--quantizers", "none", "--out", __file__], "results cannot be written there"),
    ],
)
def test_ruler_refuses_in_one_line(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "ruler", "--out", str(tmp_path), "--no-plot", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


@pytest.mark.parametrize("command", [["eval", "coverage"], ["eval", "trust"], ["eval", "layers"]])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--quantizers", ""], "no quantizer is named"),
        (["--quantizers", "int8_dither,int9"], "unknown quantizer 'int9'"),
        (["--quantizers", "none", "--out", __file__], "results cannot be written there"),
    ],
)
def test_analyses_refuse_in_one_line_before_a_model_is_loaded(
    command: list[str], options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--model", "nowhere", "--out", str(tmp_path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["eval", "ruler", "--model", "x", "--quantizers", "none", "--out", str(tmp_path)]) == 2
    assert "pip install 'witcert[eval]'" in capsys.readouterr().err


def test_a_model_that_reads_english_gets_english_tasks(tmp_path: Path, bpe: PreTrainedTokenizerFast) -> None:
    """An untrained model: its answers are worth nothing, but everything about them is measured."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = LlamaConfig(vocab_size=len(bpe), eos_token_id=None, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    bpe.save_pretrained(tmp_path / "model")
    command = ["eval", "ruler", "--model", str(tmp_path / "model"), "--quantizers", "int8_dither", "--no-plot"]
    command += ["--modes", "raw,exact", "--tasks", "question_answering", "--lengths", "512,600", "--samples", "1"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    records = read_records(tmp_path / "out" / "samples.jsonl")
    assert [(r.mode, r.num_tokens) for r in records] == [("raw", 512), ("raw", 600), ("exact", 512), ("exact", 600)]
    counts = [(r.meter["cells_measured"], r.meter["cells_exact"]) for r in records if r.meter is not None]
    assert counts == [(23 * 2 * 2, 0)] * 2 + [(0, 23 * 2 * 2)] * 2  # an exact cache certifies nothing
    assert json.loads((tmp_path / "out" / "run.json").read_text())["source"] == "natural"


def record(quantizer: str, mode: str, index: int, score: float, log_a: float | str = 1.0) -> SampleRecord:
    meter = {"tau": 0.2, "tier": "deterministic", "cells_measured": 4, "cells_unknown": 2, "cells_exact": 1}
    meter |= {"damaged_cells": 0}
    meter |= {"tv_certified_cells": 1, "tv_certified_any_query": 1}
    meter |= {"worst": 0.7, "log_a_max": log_a, "audited": 4, "violations": 0, "mismatches": 0, "tv_max": 0.1}
    meter |= {"repaired_blocks": index, "repaired_bytes": 10, "gate_within_target": 1, "gate_ranked": 1}
    meter |= {"gate_above_target": 2}
    return SampleRecord(quantizer, mode, "t", 64, index, score, "", ["x"], "offline", 0.1, meter)


def test_the_comparison_of_made_up_records() -> None:
    records = [record("none", "exact", i, 1.0) for i in range(4)]
    records += [record("q", "raw", i, score, log_a) for i, score, log_a in ((0, 1, 0.1), (1, 0, "inf"), (2, 0.5, 2))]
    records += [record("q", "gated", i, 1.0) for i in range(3)]
    rows = {row["mode"]: row for row in compare(records, {"model": "m"}, resamples=500, seed=0)["rows"]}
    assert list(rows) == ["exact", "raw", "gated"]
    assert rows["raw"]["score"]["value"] == 0.5
    assert rows["raw"]["minus_exact"]["count"] == 3
    assert rows["raw"]["minus_exact"]["value"] == -0.5
    assert rows["raw"]["zero_scores"] == 1
    assert rows["raw"]["ranking"]["log_a_max"]["auroc"]["value"] == 1.0
    assert rows["raw"]["meter"]["tv_certified_share"] == 0.25
    assert rows["raw"]["meter"]["cells_unknown"] == 6
    assert rows["gated"]["minus_raw"]["value"] == 0.5
    assert rows["gated"]["repairs"] == {
        "blocks_median": 1,
        "blocks_max": 2,
        "bytes_total": 30,
        "within_target": 3,
        "ranked": 3,
        "above_target": 6,
    }


def test_records_are_checked_when_they_are_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, {"model": "m"})
    file.add(record("q", "raw", 0, 1.0, "inf"))
    file.close()
    (known,) = read_records(tmp_path / "samples.jsonl")
    assert known == record("q", "raw", 0, 1.0, "inf")
    with (tmp_path / "samples.jsonl").open("a") as more:
        more.write('{"schema": "witcert.sample/1"}\n')
    with pytest.raises(ReportError, match="line 2: is no record"):
        RecordFile(tmp_path, {"model": "m"})


def test_words_of_the_command_line() -> None:
    assert split("a:x=1,y=2, b ,,c:z=[1", brackets=True) == ["a:x=1,y=2", "b", "c:z=[1"]
    assert parse_quantizer("int4_token_group:group_size=16") == QuantizerSpec(
        "int4_token_group:group_size=16", "int4_token_group", {"group_size": 16}
    )
    assert parse_quantizer("a:b=1@4") == QuantizerSpec("a:b=1@4", "a", {"b": 1}, 4)
    for wrong in ("a:b=1@3", "a:", "a:b", "a:b=1,b=2", "a:b=[1"):
        with pytest.raises(InputError, match="quantizer 'a:"):
            parse_quantizer(wrong)


def test_modes_become_gates(tmp_path: Path) -> None:
    spec = parse_quantizer("int8_dither")
    base = base_settings(None)
    assert build_policy(base, spec, "raw").gate.kind == "observe"
    assert build_policy(base, spec, "gated").gate.kind == "combined"
    assert build_policy(base, spec, "gated").stride == 1
    four = parse_quantizer("int4_token_group@8")
    assert [build_policy(base, four, mode).sketch_bits for mode in ("raw", "gated", "exact")] == [8, 8, 0]
    assert build_policy(base, parse_quantizer("int4_token_group"), "raw").sketch_bits == 0
    assert build_policy(base, spec, "exact").quantizer.name == "none"
    assert build_policy(base, spec, "raw", (1, 3)).quantizer.layers == (1, 3)
    file = tmp_path / "p.yaml"
    text = "version: 1\nquantizer: {name: int8_dither}\nmeter: {tier: probabilistic, stride: 4}\ngate: {tau: 0.3}\n"
    file.write_text(text)
    assert base_settings(file, stride=8)["meter"] == {"tier": "probabilistic", "stride": 8}
    mine = base_settings(file)
    assert build_policy(mine, spec, "gated").gate.tau == 0.3
    assert build_policy(mine, spec, "exact").tier == "deterministic"
    assert build_policy(mine, spec, "raw").stride == 4
    with pytest.raises(PolicyError, match="raw: quantizer int4"):
        build_policy(mine, parse_quantizer("int4_token_group"), "raw")


def test_commands_and_options_of_the_pages_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text() + (root / "docs" / "evaluation.md").read_text()
    shown = re.findall(r"witcert ((?:eval )?[a-z]+)((?: --[a-z-]+ [^`\n]*?)?)(?=[`\n]|  )", text)
    commands = {name: options for name, options in shown if name.split()[0] in ("capacity", "meter", "eval")}
    assert set(commands) >= {"capacity", "meter", "eval ruler", "eval coverage", "eval trust", "eval layers"}
    for name, options in commands.items():
        assert main([*name.split(), "--help"]) == 0
        told = capsys.readouterr().out
        assert all(option in told for option in re.findall(r"--[a-z-]+", options)), name


@pytest.mark.parametrize("batch", ["1", "2"])
def test_a_probe_is_answered_beside_the_prompts(
    batch: str, twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else is metered where the policy says so."""
    (tmp_path / "p.yaml").write_text("{version: 1, quantizer: {name: int4_token_group}, meter: {stride: never}}")
    (tmp_path / "p.txt").write_text("key1 is 23\nkey2 is 42")
    command = ["meter", "--model", str(twin_path), "--policy", str(tmp_path / "p.yaml"), "--batch", batch]
    command += ["--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "5"]
    probe = "max(bound) by layer where phase == generated every 2 for 3 rows"
    assert main([*command, "--json", "--probe", probe]) == 0
    *answers, asked = map(json.loads, capsys.readouterr().out.splitlines())
    assert (asked["probe"], asked["rows"], asked["ended"], asked["unknown"]) == (probe, 3, "rows", {})
    assert sum(answer["summary"]["rows_metered"] for answer in answers) == 3
    by_layer = {group["by"]["layer"]: group["max"] for group in asked["groups"]}
    metered = [answer["summary"] for answer in answers if answer["summary"]["rows_metered"]]
    for layer, largest in by_layer.items():
        heads = [x for summary in metered for x in summary["worst_by_layer_head"][layer] if isinstance(x, float)]
        assert largest == max(heads)
    assert main([*command, "--probe", "quantize(out_bound_rel) by layer", "--probe", "top(3, bound)"]) == 0
    assert "#" in capsys.readouterr().out
    assert main([*command, "--probe", 'max(bound) where lora == "x"']) == 2
    assert "column 18: lora: this engine does not say it" in capsys.readouterr().err
