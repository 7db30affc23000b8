"""The wheels of all distributions: what is in them, what they say of themselves, and that they work where unpacked."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from witcert_core.kernels.native import toolchain

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "witcert": ROOT,
    "witcert_demo": ROOT / "demo",
    **{f"witcert_{path.name}": path for path in (ROOT / "adapters" / "sglang", ROOT / "adapters" / "vllm")},
    **{f"witcert_{path.parent.name}": path.parent for path in sorted((ROOT / "plugins").glob("*/pyproject.toml"))},
}
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def package_of(name: str) -> str:
    return "witcert_core" if name == "witcert" else name


def built(name: str, work: Path, **env: str) -> Path:
    """Built from a copy, so that the tree is left alone, by the backend of pyproject.toml, without a network."""
    folder, source = FOLDERS[name], work / name
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", "VERSION", *(["setup.py"] if name == "witcert" else [])):
        shutil.copyfile(folder / file, source / file)
    package = package_of(name)
    shutil.copytree(folder / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    if (folder / "tests").exists() and name != "witcert":
        shutil.copytree(folder / "tests", source / "tests")
    command = [sys.executable, "-c", BUILD, str(work)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob(f"{name}-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    work = tmp_path_factory.mktemp("wheels")
    return {name: zipfile.ZipFile(built(name, work)) for name in FOLDERS}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(path).decode())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_its_package_and_nothing_else(name: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    """Every file of the package, data included, and the licence; no tests, no benchmarks, no training."""
    package = FOLDERS[name] / package_of(name)
    wanted = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and not {"__pycache__", "training"} & set(path.parts)
    }
    held = {path for path in wheels[name].namelist() if ".dist-info/" not in path}
    assert held == wanted
    about = {path.partition(".dist-info/")[2] for path in wheels[name].namelist()} - {""}
    assert about >= {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_wheel_says_of_itself(name: str, wheels: dict[str, zipfile.ZipFile]) -> None:
    said, core = metadata(wheels[name]), metadata(wheels["witcert"])
    assert said["Version"] == core["Version"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Summary"] not in (None, "", "UNKNOWN")
    assert said["Description-Content-Type"] == "text/markdown"
    assert "WitCert" in str(said.get_payload()).partition("\n")[0]
    assert said.get_all("Project-URL") is None is said["Home-page"]  # there is no address to give
    assert "Operating System :: POSIX :: Linux" in said.get_all("Classifier", [])
    assert not [
        c for c in said.get_all("Classifier", []) if c.startswith("License ::")
    ]  # excluded by License-Expression
    if name != "witcert":
        (needed,) = (r for r in map(Requirement, said.get_all("Requires-Dist", [])) if r.name == "witcert")
        assert needed.specifier.contains(core["Version"])
        assert not needed.specifier.contains("1.0")


def test_unpacked_wheels_work_as_a_stranger_uses_them(wheels: dict[str, zipfile.ZipFile], tmp_path: Path) -> None:
    """Before anything else on the path, away from the tree: presets, schemas, quantizers and tasks are found."""
    for wheel in wheels.values():
        wheel.extractall(tmp_path / "site")
    code = """
import sys
from witcert_core.cli import main
from witcert_core.evaluate.task_registry import task_sources
from witcert_core.policy.plugins import quantizer_registry
from witcert_core.report.schema import load_schema
print(load_schema("request")["$schema"], load_schema("cell")["$schema"], *sorted(task_sources()))
registry = quantizer_registry()
for name in registry.names():
    module = sys.modules[registry.cls(name).__module__]
    print(name, module.__file__)
sys.exit(main(["policy", "init", "policy.yaml"]) or main(["policy", "check", "policy.yaml"]))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    head, *found = done.stdout.splitlines()
    assert head.endswith(" natural needles")
    quantizers = dict(line.split() for line in found if "/" in line and " " in line and line.endswith(".py"))
    plugins = {path.name for path in FOLDERS.values() if path.parent.name == "plugins"}
    assert set(quantizers) >= plugins | {"int8_dither"}
    assert all(Path(path).is_relative_to(tmp_path / "site") for path in quantizers.values())


@pytest.mark.skipif(platform.machine() not in toolchain.LEVELS, reason="no kernels are known for this machine")
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    """Those of every level, of which the processor at hand takes its best; nothing is compiled and nothing written."""
    path = built("witcert", tmp_path, WITCERT_BUILD_KERNELS="1")
    assert path.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path / "site")
        held = {name for name in wheel.namelist() if name.endswith(".so")}
    home = "witcert_core/kernels/native/built"
    levels = [level.name for level in toolchain.LEVELS[platform.machine()]]
    assert held == {f"{home}/{level}/{op}.so" for level in levels for op in toolchain.operations()}
    code = """
import torch
from witcert_core.kernels.native import build
assert build.not_compiled() is None, build.not_compiled()
from witcert_core.kernels.witness import record_witness
from witcert_core.cache.bands import band_map
from witcert_core.quantizers.rotary import RotarySpec
x, witness, values = torch.ones(3, 1, 32), torch.full((3, 1, 16), 255, dtype=torch.uint8), torch.zeros(3, 1).byte()
record_witness(x, x, x, x, witness, values, torch.arange(3), band_map(RotarySpec(32), 16))
assert not witness.any(), witness
print(build.__file__)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CXX": "/nonexistent", "TRITON_INTERPRET": "0"}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("avx512_vnni", "avx512_vnni"),
        ("avx512vl", "avx512"),
        ("avx2", "avx2"),
        ("avx", "x86_64"),
    ],
)
def test_a_processor_gets_what_it_has(features: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {level.name: level for level in toolchain.LEVELS["x86_64"]}
    has = levels[name].needs | {"sse2", features}
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(toolchain, "features", lambda: frozenset(has))
    found = toolchain.level()
    assert found is not None
    assert found.name == name
