"""The example plugins, installed as their READMEs say, are found by their entry points and do what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("quantizer", "packed_quantizer", "gate", "observer")
QUANTIZER, PACKED, GATE, OBSERVER = PLUGINS = [EXAMPLES / f"{kind}_plugin" for kind in KINDS]

USE_QUANTIZER = """
import json, sys, torch
from witcert_core import QuantContext, RotarySpec, check_quantizer, load_policy
from witcert_core.policy.plugins import quantizer_registry

registry = quantizer_registry()
quantizer = load_policy(sys.argv[1]).resolved_quantizer
for head_dim in (64, 80, 128):
    check_quantizer(quantizer, head_dim)
x = torch.tensor([0.3, 0.26, -100.0] + [0.0] * 61).reshape(1, 1, 64)
ctx = QuantContext((0,), 64, RotarySpec(64), torch.bfloat16)
out = quantizer.fake_quantize(x, kind="k", layer=0, positions=torch.zeros(1, dtype=torch.int64), ctx=ctx)
print(json.dumps({
    "names": registry.names(),
    "source": registry.source("example_rounding"),
    "out": out[0, 0, :3].tolist(),
    "bytes": quantizer.bytes_per_token_head(128),
}))
"""
USE_PACKED = """
import json, sys
from witcert_core import check_quantizer, load_policy
from witcert_core.quantizers.coded import token_layout, why_not_packed

quantizer = load_policy(sys.argv[1]).resolved_quantizer
for head_dim in (64, 80, 128):
    check_quantizer(quantizer, head_dim)
sizes = [token_layout(quantizer, kind, 128).nbytes for kind in "kv"]
print(json.dumps([why_not_packed(quantizer), sizes, quantizer.bytes_per_token_head(128)]))
"""
USE_GATE = """
import json, sys
from witcert_core import check_gate, load_policy

policy = load_policy(sys.argv[1])
check_gate(policy.resolved_gate)
print(json.dumps([policy.resolved_gate.name, policy.resolved_gate.tau, policy.repairs, policy.stride]))
"""
USE_OBSERVER = """
import logging, sys, torch
from report_batches import batch
from witcert_core import RequestLedger, load_policy

logging.basicConfig(format="%(message)s")
policy = load_policy(sys.argv[1])
ledger = RequestLedger(policy, engine="test", num_layers=2, num_qo_heads=2)
ledger.observe("a", 0, 1, 5, batch(meter=[[0.1, 0.3]]), 0)
ledger.observe("a", 1, 1, 5, batch(meter=[[0.2, 0.1]]), 0)
ledger.finish("a", "stop")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plugins are installed, without an index and without touching this one."""
    folder = tmp_path_factory.mktemp("plugins")
    target = folder / "site"
    sources = [str(shutil.copytree(example, folder / example.name)) for example in PLUGINS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), *sources], check=True, timeout=120
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(target), str(EXAMPLES.parent / "tests" / "common")])}


def run(code: str, policy: str, env: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\n{policy}\n")
    return subprocess.run([sys.executable, "-c", code, str(file)], env=env, capture_output=True, text=True, check=False)


def test_a_policy_can_name_the_quantizer(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(USE_QUANTIZER, "quantizer: {name: example_rounding, params: {step: 0.25}}", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "example_rounding" in seen["names"]
    assert seen["source"] == "witcert-example-rounding 0.1.0"
    assert seen["out"] == [0.25, 0.25, -31.75]
    assert seen["bytes"] == 256


def test_a_policy_can_name_the_quantizer_that_can_be_stored(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(USE_PACKED, "quantizer: {name: example_packed, params: {bits: 3}}", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, [50, 50], 100.0]
    listed = subprocess.run(
        [sys.executable, "-c", "from witcert_core.cli import main; main(['quantizers'])"],
        env=installed,
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = [line for line in listed.stdout.splitlines() if "example_packed" in line]
    assert " yes " in row
    (row,) = [line for line in listed.stdout.splitlines() if "example_rounding" in line]
    assert " yes " not in row


def test_a_policy_can_name_the_gate(installed: dict[str, str], tmp_path: Path) -> None:
    gate = "quantizer: {name: int4_token_group}\ngate: {kind: example_worst_first, tau: 0.3}"
    done = run(USE_GATE, gate, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["example_worst_first", 0.3, True, 1]


def test_the_observer_is_at_work_wherever_it_is_installed(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(USE_OBSERVER, "quantizer: {name: int4_token_group}", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a: at most 0.300, in layer 0, head 1" in done.stderr


def test_they_are_found_only_through_their_distributions(tmp_path: Path) -> None:
    """The same modules on the path, but not installed: the policy that names one is refused."""
    on_path = os.environ | {"PYTHONPATH": os.pathsep.join([str(QUANTIZER), str(GATE)])}
    for code, policy, words in (
        (USE_QUANTIZER, "quantizer: {name: example_rounding}", "unknown quantizer 'example_rounding'"),
        (USE_GATE, "quantizer: {name: none}\ngate: {kind: example_worst_first}", "unknown gate 'example_worst_first'"),
    ):
        done = run(code, policy, on_path, tmp_path)
        assert done.returncode != 0
        assert words in done.stderr


def test_the_quantizer_is_one_function_and_each_takes_ten_lines_of_packaging() -> None:
    assert (QUANTIZER / "witcert_example_rounding.py").read_text().count("def ") == 1
    code = (PACKED / "witcert_example_packed.py").read_text()
    assert code.count("def ") == 2
    assert len([line for line in code.splitlines() if line.strip()]) < 25
    for example in PLUGINS:
        packaging = (example / "pyproject.toml").read_text().splitlines()
        assert sum(bool(line.strip()) and not line.startswith("[") for line in packaging) <= 10
