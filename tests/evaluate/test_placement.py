"""Weights on another device than the cache: what is measured is the same, and what is not there is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend import DEVICE, Pretended, pretending

from witcert_core.cli import main
from witcert_core.evaluate.forcing import measuring_policy
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import load_model
from witcert_core.evaluate.offline.placement import Placement
from witcert_core.evaluate.settings import parse_quantizer

PROMPT = [*range(20, 120)]
KVQUANT = parse_quantizer("kvquant:calibration_tokens=16")  # of keys before RoPE: its table is on a device too


def answer(path: Path, placement: Placement, elsewhere: tuple[int, ...] = ()) -> dict[str, Any]:
    """The summary of a request; the layers `elsewhere` lie on the device that is pretended."""
    loaded = load_model(str(path), placement=placement)
    for index in elsewhere:
        layer = loaded.model.model.layers[index].to(DEVICE)
        assert isinstance(layer.self_attn.q_proj.weight.data, Pretended)

        def over(_module: Any, args: Any, kwargs: Any) -> Any:
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), (args, kwargs))

        layer.register_forward_pre_hook(over, with_kwargs=True)
        layer.register_forward_hook(lambda _m, _a, out: out.to("cpu"))
    summary = OfflineEngine(loaded, measuring_policy(KVQUANT), 120).generate("r", PROMPT, 8).summary
    assert summary["cells_measured"] > 0
    assert summary["audit"]["violations"] == 0
    return summary


def test_layers_on_several_devices_say_the_same(twin_path: Path) -> None:
    here = answer(twin_path, Placement())
    with pretending():
        assert answer(twin_path, Placement(), (1, 2)) == here


def test_weights_that_wait_on_a_disk(twin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate brings them when their layer runs, as it brings those of a device that is full."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a b c d e f"}))
    modules: dict[str, str | int] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    modules["lm_head"] = "cpu"
    modules |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    assert answer(twin_path, Placement(device_map=modules)) == answer(twin_path, Placement())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--device", "cuda"], "device is 'cuda', but PyTorch"),
        (["--device", "cuda:1"], "finds no GPU here; take cpu"),
        (["--device", "mps"], "device is 'mps'; allowed are cpu, cuda and cuda:N"),
        (["--device", "gpu 0"], "device is 'gpu 0'; allowed are"),
        (["--device", "cpu", "--device-map", "auto"], "--device and --device-map are both given"),
        (["--device-map", "everywhere"], "device_map is 'everywhere'; allowed are auto, balanced"),
        (["--device-map", "{}"], "or a JSON object of modules"),
        (["--device-map", '{"model": 0}'], "device is 'cuda:0', but PyTorch"),
        (["--device-map", '{"model": null}'], "device_map puts 'model' on None"),
        (["--device-map", "auto", "--batch", "2"], "side by side on the CPU alone"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(
    options: list[str], why: str, twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in why and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    (tmp_path / "prompts").write_text("a b c")
    command = ["meter", "--model", str(twin_path), "--prompts", str(tmp_path / "prompts"), "--quantizer", "int8_dither"]
    assert main([*command, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_every_command_that_loads_a_model_takes_a_device(
    twin_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path), "--quantizers", "int8_dither", "--device", "mps"]
    for command in ("ruler", "coverage", "trust", "layers", "drift"):
        assert main(["eval", command, "--model", str(twin_path), *out]) == 2
        assert "device is 'mps'" in capsys.readouterr().err
    for command in ("ruler", "drift"):
        asked = ["eval", command, "--url", "http://127.0.0.1:9", "--out", str(tmp_path), "--device-map", "auto"]
        assert main([*asked, *(["--no-plot"] if command == "ruler" else [])]) == 2
        assert "--device says how a model is run" in capsys.readouterr().err
