"""`witcert eval ruler --engine vllm`: the servers it starts, and what they say of their capacity."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from witcert_core.cli import main
from witcert_core.evaluate.capacity import capacity, read_shape

pytestmark = pytest.mark.vllm
MEMORY, BLOCK = 64 << 20, 32


@pytest.fixture(scope="module")
def evaluated(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin without the meter and behind a gate, a server each, asked the same two questions."""
    out = tmp_path_factory.mktemp("eval")
    options = f"--gpu-memory-utilization 0.3 --kv-cache-memory-bytes {MEMORY} --block-size {BLOCK} --max-model-len 1024"
    command = ["eval", "ruler", "--model", str(twin), "--engine", "vllm", "--quantizers", "fp8_e4m3_cast"]
    command += ["--modes", "exact,gated", "--tasks", "multi_key", "--lengths", "128", "--samples", "2", "--no-plot"]
    command += ["--dtype", "bfloat16", "--server-options", options, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # capacity is said there
        patch.setenv("VLLM_CPU_CI_ENV", "1")  # no C++ compiler runs: half a minute less
        assert main(command) == 0
    return out


def test_servers_are_started_asked_and_compared(evaluated: Path) -> None:
    exact, gated = json.loads((evaluated / "results.json").read_text())["rows"]
    assert (exact["quantizer"], exact["mode"], exact["engines"]) == ("none", "exact", ["vllm"])
    assert (gated["quantizer"], gated["mode"], gated["engines"]) == ("fp8_e4m3_cast", "gated", ["vllm"])
    assert exact["score"]["value"] == gated["score"]["value"] == 1.0
    assert exact["score"]["count"] == gated["score"]["count"] == 2
    assert exact["meter"] is None
    assert gated["meter"]["violations"] == 0 < gated["meter"]["audited"]
    assert gated["repairs"]["blocks_median"] > 0


RUNS = [("none-exact", "fp16"), ("fp8_e4m3_cast-gated", "metered:fp8_e4m3_cast@4")]


@pytest.mark.parametrize(("run", "layout"), RUNS)
def test_capacity_is_what_vllm_says(evaluated: Path, twin: Path, run: str, layout: str) -> None:
    """`witcert capacity` against the tokens of vLLM's own log, which are whole blocks."""
    (told,) = re.findall(r"KV cache size: ([\d,]+) tokens", (evaluated / f"vllm-{run}.log").read_text())
    tokens, ours = int(told.replace(",", "")), capacity(layout, read_shape(twin), MEMORY).tokens
    assert ours - BLOCK < tokens <= ours
    assert tokens > 20_000
