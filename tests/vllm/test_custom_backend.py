"""`--attention-backend CUSTOM`: a user's own class is wrapped like vLLM's, or refused by name.

vLLM's CPU platform ignores the option, so the choice is made as its CUDA platform makes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_backends
import pytest
import witcert_vllm
from conftest import samples_of_each_task
from custom_backends import CountingImpl, choose
from engine import LAYERS, in_own_process, running_engine, write_policy
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from witcert_vllm import backend, process
from witcert_vllm.backend import check_contract

from witcert_core.errors import UnsupportedError

pytestmark = pytest.mark.vllm

PLUGIN = Path(__file__).with_name("custom_plugin")
POLICY = {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1, "audit_every": 1}}
CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def chosen_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(choose))
    yield
    CUSTOM.clear_override()
    backend.STOCK.pop("CUSTOM", None)


def register(name: str) -> None:
    register_backend(CUSTOM, f"custom_backends.{name}")


def run(checkpoint: Path, work: Path, policy: dict[str, Any] = POLICY) -> None:
    with running_engine(checkpoint, work, policy, attention_backend="CUSTOM"):
        pass


def test_a_class_of_ones_own_is_metered(checkpoint: Path, tmp_path: Path) -> None:
    samples = samples_of_each_task(1, num_tokens=64, seed=91)
    register("Counting")
    before = CountingImpl.calls
    with running_engine(checkpoint, tmp_path, POLICY, attention_backend="CUSTOM") as engine:
        answers = engine.ask([sample.prompt for sample in samples])
        passes = process.runtime().passes
        status = engine.llm.collective_rpc("witcert_status")[0]
    assert status["backend"] == "CUSTOM (custom_backends.Counting)"
    assert CountingImpl.calls - before == passes * LAYERS > 0
    assert [answer.tokens for answer in answers] == [list(sample.answer_ids) for sample in samples]
    for audit in (answer.summary["audit"] for answer in answers):
        assert audit["violations"] == audit["mismatches"] == 0 < audit["outputs"]
    assert all(answer.summary["cells_measured"] > 0 for answer in answers)


def test_a_class_that_attends_otherwise_is_found_by_its_outputs(checkpoint: Path, tmp_path: Path) -> None:
    """True TV cannot show it: both of its sides take the scale that the class says it has."""
    (sample,) = samples_of_each_task(1, num_tokens=64, seed=91)[:1]
    register("Tilted")
    with running_engine(checkpoint, tmp_path, POLICY, attention_backend="CUSTOM") as engine:
        (answer,) = engine.ask([sample.prompt])
    audit = answer.summary["audit"]
    assert audit["violations"] == 0 < audit["mismatches"] <= audit["outputs"]
    assert answer.summary["tv_certified_share"] == 0
    assert answer.summary["claim"].startswith("nothing: ")


def test_a_plugins_class_is_metered_in_the_workers_process(checkpoint: Path, tmp_path: Path) -> None:
    """The backend comes as an installed plugin, loaded in each of vLLM's processes."""
    (sample,) = samples_of_each_task(1, num_tokens=64, seed=91)[:1]
    path = os.pathsep.join([str(PLUGIN), str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")])
    options = {"attention_backend": "CUSTOM"}
    variables: dict[str, Any] = {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    found = in_own_process(checkpoint, tmp_path, POLICY, [sample.prompt], options=options, **variables)
    assert found["status"]["backend"] == "CUSTOM (custom_backends.Counting)"
    (answer,) = found["answers"]
    assert answer["tokens"] == list(sample.answer_ids)
    assert answer["summary"]["cells_measured"] == len(answer["cells"]) > 0
    assert answer["summary"]["audit"]["violations"] == answer["summary"]["audit"]["mismatches"] == 0


def test_one_registered_after_ours_is_wrapped_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads plugins in any order."""
    monkeypatch.setenv("WITCERT_POLICY", str(write_policy(tmp_path / "p.yaml", **POLICY)))
    stock = backend.STOCK["CPU_ATTN"]
    witcert_vllm.load()
    register("Counting")
    register_backend(AttentionBackendEnum.CPU_ATTN, "custom_backends.Counting")
    EngineArgs(model=str(checkpoint), dtype="float32").create_engine_config()
    for name in ("CUSTOM", "CPU_ATTN"):
        assert AttentionBackendEnum[name].get_path() == f"witcert_vllm.backend.{name}"
        assert AttentionBackendEnum[name].get_class().get_impl_cls().witcert_metered
        assert backend.STOCK[name] == "custom_backends.Counting"
    register_backend(AttentionBackendEnum.CPU_ATTN, stock)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Halving", r"CUSTOM \(custom_backends\.Halving\) does not give back"),
        ("WritesInForward", r"custom_backends\.WritesInForward\) writes its cache inside forward"),
    ],
)
def test_a_cache_that_cannot_be_read_is_refused(checkpoint: Path, tmp_path: Path, name: str, named: str) -> None:
    register(name)
    with pytest.raises(UnsupportedError, match=named):
        run(checkpoint, tmp_path)


def test_packed_pages_are_not_for_it(checkpoint: Path, tmp_path: Path) -> None:
    register("Counting")
    with pytest.raises(UnsupportedError, match=r"custom_backends\.Counting.*storage"):
        run(checkpoint, tmp_path, {"quantizer": {"name": "int8_dither", "storage": "packed"}})


def test_another_contract_is_refused() -> None:
    check_contract("CUSTOM", custom_backends.Counting)
    for cls, named in (
        (custom_backends.NotABackend, "NotABackend.*no AttentionBackend"),
        (custom_backends.OtherForward, r"OtherImpl\.forward takes \(self, q, k, v\)"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            check_contract("CUSTOM", cls)


def test_nothing_registered_is_vllms_own_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CUSTOM must be registered"):
        run(checkpoint, tmp_path)
