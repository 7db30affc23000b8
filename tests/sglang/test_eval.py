"""`witcert eval ruler --engine sglang`: the server it starts, asked and stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from witcert_demo.servers import server_command, server_environment

from witcert_core.cli import main

pytestmark = pytest.mark.sglang


def test_a_gated_server_is_started_asked_and_compared(
    twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server_environment(None).items():
        monkeypatch.setenv(name, value)
    options = server_command(twin, 0, [])
    options = options[options.index("--device") :]  # those that every CPU server here has
    command = ["eval", "ruler", "--model", str(twin), "--engine", "sglang", "--quantizers", "fp8_e4m3_cast"]
    command += ["--modes", "gated", "--tasks", "multi_key,multi_query", "--lengths", "128", "--samples", "2"]
    command += ["--no-plot", "--dtype", "float32", "--server-options", " ".join(options), "--out", str(tmp_path)]
    assert main(command) == 0
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["quantizer"], row["mode"], row["engines"]) == ("fp8_e4m3_cast", "gated", ["sglang"])
    assert row["score"]["count"] == 4
    assert row["score"]["value"] == 1.0  # a quarter without the gate
    assert row["meter"]["violations"] == 0 < row["meter"]["audited"]
    assert row["repairs"]["blocks_median"] > 0
    assert (tmp_path / "sglang-fp8_e4m3_cast-gated.log").exists()
