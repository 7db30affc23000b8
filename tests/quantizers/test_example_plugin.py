"""The example plugin, installed as its README says, is found by its entry point and usable by a policy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "quantizer_plugin"

USE = """
import json, sys, torch
from witcert_core import QuantContext, RotarySpec, load_policy
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.quantizers.conformance import check_quantizer

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plugin is installed, without an index and without touching this one."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")
    target = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
        timeout=120,
    )
    return os.environ | {"PYTHONPATH": str(target)}


def test_a_policy_can_name_it(installed: dict[str, str], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nquantizer: {name: example_rounding, params: {step: 0.25}}\n")
    done = subprocess.run(
        [sys.executable, "-c", USE, str(policy)], env=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "example_rounding" in seen["names"]
    assert seen["source"] == "witcert-example-rounding 0.1.0"
    assert seen["out"] == [0.25, 0.25, -31.75]
    assert seen["bytes"] == 256


def test_it_is_found_only_through_its_distribution(tmp_path: Path) -> None:
    """The same module on the path, but not installed: the policy that names it is refused."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nquantizer: {name: example_rounding}\n")
    done = subprocess.run(
        [sys.executable, "-c", USE, str(policy)],
        env=os.environ | {"PYTHONPATH": str(EXAMPLE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "unknown quantizer 'example_rounding'" in done.stderr


def test_it_is_one_function_and_ten_lines_of_packaging() -> None:
    packaging = (EXAMPLE / "pyproject.toml").read_text().splitlines()
    assert sum(bool(line.strip()) and not line.startswith("[") for line in packaging) <= 10
    assert (EXAMPLE / "witcert_example_rounding.py").read_text().count("def ") == 1
