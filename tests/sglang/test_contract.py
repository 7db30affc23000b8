"""SGLang's private names are what the adapter takes them for; the one that is not is named, also by the doctor."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import witcert_sglang
from conftest import write_policy
from sglang.srt.managers import auxiliary_output
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from test_refusals import changed_config, on_import_of
from witcert_sglang import plugin
from witcert_sglang.contract import CONTRACT
from witcert_sglang.doctor import of_model
from witcert_sglang.hooks import Hook
from witcert_sglang.worker import SchedulerProcess

from witcert_core.policy.model import parse_policy
from witcert_core.serving.contract import Members, Signature, broken

pytestmark = pytest.mark.sglang


def hooks() -> list[Hook]:
    packed = {"version": 1, "quantizer": {"name": "int8_dither", "storage": "packed"}}
    policy = parse_policy(packed)
    return plugin.hooks(policy, SchedulerProcess(policy))


def hooked() -> list[Signature]:
    return [Signature(hook.target, hook.parameters) for hook in hooks()]


def test_sglang_keeps_the_contract() -> None:
    assert broken(CONTRACT) == []
    assert broken(hooked()) == []
    assert len(hooks()) > 15


def test_the_name_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", lambda self, layer, slots: None)
    monkeypatch.setattr(MHATokenToKVPool, "move_kv_cache", lambda self, source, target: None)
    monkeypatch.delattr(auxiliary_output, "append_auxiliary_output")
    (changed, gone) = sorted(broken(CONTRACT), key=lambda line: "append" in line)
    assert changed.startswith("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer: takes (self, layer, sl")
    assert gone.startswith("sglang.srt.managers.auxiliary_output.append_auxiliary_output: ")
    (hook,) = broken(hooked())
    assert hook.startswith("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache: takes (self, source")
    pool = next(entry for entry in CONTRACT if isinstance(entry, Members) and entry.target.endswith("MHATokenToKVPool"))
    assert broken([Members(pool.target, (*pool.names, "k_pages"))]) == [f"{pool.target}.k_pages: no longer there"]


def test_every_name_imported_from_sglang_is_in_the_contract() -> None:
    known = {entry.target for entry in CONTRACT} | {
        f"{entry.target}.{name}" for entry in CONTRACT if isinstance(entry, Members) for name in entry.names
    }
    imported = set()
    for file in Path(witcert_sglang.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert len(imported) > 15
    assert [name for name in sorted(imported) if not any(f"{k}.".startswith(f"{name}.") for k in known)] == []


def doctor(*arguments: str, extra_path: Path | None = None) -> tuple[int, list[str]]:
    env = {name: value for name, value in os.environ.items() if name != "WITCERT_POLICY"}
    if extra_path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(extra_path), *filter(None, [env.get("PYTHONPATH")])])
    code = "import sys; from witcert_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "doctor", "--engine", "sglang", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr or extra_path is not None, done.stderr  # SGLang logs one for a lost hook
    return done.returncode, done.stdout.splitlines()


def test_the_doctor_says_what_is_metered_and_why_not(checkpoint: Path, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "p.yaml", quantizer={"name": "int4_token_group"}, meter={"layers": [0, 2]})
    code, lines = doctor("--model", str(checkpoint), "--policy", str(policy))
    assert code == 0, lines
    live = [line for line in lines if "hook: live" in line]
    assert len(live) == len(hooks()) - 2  # without the two of a packed pool
    assert any("SGLang 0.5.23" in line for line in lines)
    assert any("2 of 4 layers x 4 query heads: 8 cells" in line for line in lines)
    assert any("layers [1, 3]: left out by meter.layers" in line for line in lines)
    assert any("WITCERT_POLICY is not set" in line for line in lines)
    assert any("attention: prompt chunks of TorchNativeAttnBackend; decode steps of" in line for line in lines)


def test_the_doctor_names_what_refuses(checkpoint: Path, tmp_path: Path) -> None:
    breakage = "from sglang.srt.managers.scheduler import Scheduler; del Scheduler.get_init_info"
    (tmp_path / "sitecustomize.py").write_text(on_import_of("witcert_sglang.plugin", breakage))
    model = changed_config(checkpoint, tmp_path / "model", head_dim=72)
    code, lines = doctor("--model", str(model), extra_path=tmp_path)
    assert code == 1
    refused = [line for line in lines if line.startswith("refused")]
    assert len(refused) == 3, lines
    assert sum("Scheduler.get_init_info" in line for line in refused) == 2
    assert sum("NOT LIVE" in line for line in refused) == 1
    assert any("heads of 72 channels" in line for line in refused)


def test_the_doctor_names_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (finding,) = of_model(str(tmp_path), parse_policy({"version": 1, "quantizer": {"name": "none"}}))
    assert finding.level == "refused"
    assert str(tmp_path) in finding.text
    assert "\n" not in finding.text


def test_the_doctor_names_more_outliers_than_a_head_has(checkpoint: Path) -> None:
    quantizer = {"name": "int8_dither_bypass", "storage": "packed", "params": {"pairs": 999}}
    *_, last = of_model(str(checkpoint), parse_policy({"version": 1, "quantizer": quantizer}))
    assert last.level == "refused"
    assert "999 channel pairs" in last.text
