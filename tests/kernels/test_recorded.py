"""Caches that kernels read report what they reported when they were recorded; see `recorded.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from torch import Tensor

from . import test_engine_cache as engine
from . import test_serving as packed
from . import test_simulated as simulated

SAMPLED = {"audit_every": 0, "audit_share": 1.0, "sketch_share": 1.0, "share_seed": 3}
STORED = {"prefill_reads": "stored"}
DECODE = [(1, True), (1, True)]

PACKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "packed int8_dither": ("int8_dither", {}, {"logits_soft_cap": 20.0, "sinks": torch.linspace(-1, 3, packed.HQ)}),
    "packed int8_dither_w": ("int8_dither_w", SAMPLED, {"window_left": 6}),
    "packed int8_dither_bypass": ("int8_dither_bypass", {"tier": "deterministic"}, {}),
    "packed, certified gate": ("int8_dither", {"gate": packed.GATE}, {}),
}
SIMULATED: dict[str, tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "int4_token_group": ("int4_token_group", torch.float32, {}, {}),
    "fp8_e4m3_cast": ("fp8_e4m3_cast", torch.float16, {"meter": {"bands": 32}}, {"window_left": 6}),
    "int8_dither": ("int8_dither", torch.float32, {"meter": SAMPLED}, {}),
    "kivi": ("kivi", torch.float16, STORED, {}),
}


@pytest.fixture(autouse=True)
def same_dither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: recorded.NONCE)


def check(case: str, served: Any, jsonl: Path, options: dict[str, Any]) -> None:
    """Cold chunks, decode rows beside chunks, and generated tokens; what two requests report, and what was attended."""
    outputs: list[Tensor] = []
    stored = served.runtime.policy.prefill_reads == "stored"
    for new in [*simulated.PASSES, DECODE]:
        step, *_, out = served.step([(count, reads or stored) for count, reads in new], **options)
        step.count(served.runtime.ledger, {0, 1})
        outputs.append(out)
    summaries = [served.runtime.finish(name, "stop") for name in "ab"]
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    attended = torch.cat(outputs).double()
    found: list[Any] = [recorded.run_of([], summary, records) for summary in summaries]
    recorded.check("kernels", case, [*found, {"attended": attended.norm(dim=-1).sum(0).tolist()}])


def report(jsonl: Path) -> dict[str, str]:
    return {"jsonl": str(jsonl), "cells": "all"}


@pytest.mark.parametrize("case", PACKED)
def test_packed(case: str, tmp_path: Path) -> None:
    name, sections, options = PACKED[case]
    jsonl = tmp_path / "records.jsonl"
    served = packed.Served("kernels", name, report=report(jsonl), **{"audit_every": 1, **sections})
    check(case, served, jsonl, options)


@pytest.mark.parametrize("case", SIMULATED)
def test_simulated(case: str, tmp_path: Path) -> None:
    name, dtype, sections, options = SIMULATED[case]
    jsonl = tmp_path / "records.jsonl"
    served = simulated.Served("kernels", name, dtype, report=report(jsonl), **sections)
    check(case, served, jsonl, options)


def test_engines_own(tmp_path: Path) -> None:
    jsonl = tmp_path / "records.jsonl"
    served = engine.served("kernels", torch.float8_e4m3fn, report=report(jsonl))
    check("engine fp8_e4m3", served, jsonl, {})
