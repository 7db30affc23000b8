"""Multi-head latent attention in vLLM: tiny random checkpoints, every cell held against float64 attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import running_engine
from torch import Tensor
from witcert_vllm import process
from witcert_vllm.latent import MeteredLatentImpl

from tests.zoo import latent
from tests.zoo.families import FAMILIES, make_checkpoint
from witcert_core.meter.measure import bound_cells
from witcert_core.serving.device.sums import settled

pytestmark = pytest.mark.vllm

POLICY: dict[str, Any] = {"quantizer": {"name": "int8_token_group"}, "meter": {"stride": 1, "audit_every": 1}}
PROMPTS = [
    {"prompt_token_ids": [1] + [3 + (i * (7 + s)) % 300 for i in range(n)]} for n, s in ((60, 0), (33, 2), (0, 0))
]
SAMPLING = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("mla")
    names = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    return {name: make_checkpoint(name, directory / name) for name in names}


@dataclass
class Held:
    """What float64 says of every absorbed row: cells, violations, and how far the engine's own output is."""

    rows: int = 0
    cells: int = 0
    tv: int = 0
    out: int = 0
    apart: float = 0.0
    scales: set[float] = field(default_factory=set)
    rewritten: float = 0.0


@contextmanager
def held_to_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Each absorbed call again in float64: over the rows that were handed over and over those that are stored."""
    found = Held()
    stock = MeteredLatentImpl.forward_mqa
    exact: dict[int, dict[int, Tensor]] = {}
    write = MeteredLatentImpl.do_kv_cache_update

    def do_kv_cache_update(self: Any, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
        write(self, kv_c, k_pe, cache, slots, *rest)
        if process.in_pass():
            rows = torch.cat((kv_c, k_pe.flatten(1)), -1).to(cache.dtype)
            exact.setdefault(self.layer_id, {}).update(zip(slots.tolist(), rows, strict=True))

    def forward_mqa(self: Any, q: Any, cache: Tensor, metadata: Any, layer: Any) -> Any:
        out, lse = stock(self, q, cache, metadata, layer)
        if not process.in_pass():
            return out, lse
        runtime = process.runtime()
        query = (torch.cat(q, -1) if isinstance(q, tuple) else q).double()
        assert runtime.now is not None
        step = runtime.now.step
        rows = {row.token: number for number, row in enumerate(step.rows)}
        cells = bound_cells(settled([step.summed[self.layer_id]]))[0] if rows else None
        found.scales.add(float(self.scale))
        for token, (length, blocks) in enumerate(
            zip(metadata.decode.seq_lens, metadata.decode.block_table, strict=True)
        ):
            slots = (blocks[:, None].long() * cache.shape[1] + torch.arange(cache.shape[1])).flatten()[:length]
            stored = cache.flatten(0, 1)[slots].double()
            handed = torch.stack([exact[self.layer_id][slot] for slot in slots.tolist()]).double()
            p, p_stored = (torch.softmax(query[token] @ x.T * self.scale, -1) for x in (handed, stored))
            o, o_stored = p @ handed[:, : latent.LATENT], p_stored @ stored[:, : latent.LATENT]
            found.apart = max(found.apart, float((out[token].double() - o_stored).abs().max()))
            found.rewritten = max(found.rewritten, float((stored - handed).abs().max()))
            if cells is not None and token in rows:
                number = rows[token]
                found.rows += 1
                found.cells += len(p)
                found.tv += int((0.5 * (p - p_stored).abs().sum(-1) > cells.meter[number]).sum())
                found.out += int(((o - o_stored).norm(dim=-1) > cells.out_bound[number]).sum())
        return out, lse

    with monkeypatch.context() as patch:
        patch.setattr(MeteredLatentImpl, "do_kv_cache_update", do_kv_cache_update)
        patch.setattr(MeteredLatentImpl, "forward_mqa", forward_mqa)
        yield found


@pytest.mark.parametrize(
    ("family", "dtype", "apart"),
    [("deepseek_v2", "bfloat16", 3e-2), ("deepseek_v3", "float32", 5e-5), ("glm4_moe_lite", "float32", 5e-5)],
)
def test_every_cell_holds_in_float64(
    family: str,
    dtype: str,
    apart: float,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        held_to_float64(monkeypatch) as held,
        running_engine(checkpoints[family], tmp_path, POLICY, max_model_len=512, dtype=dtype) as engine,
    ):
        answers = engine.ask(PROMPTS, **SAMPLING)
        status = engine.llm.collective_rpc("witcert_status")[0]
    layers = status["num_layers"]
    # The first token of an answer comes from the prompt's own pass, which reads nothing quantized.
    rows = len(PROMPTS) * (SAMPLING["max_tokens"] - 1)
    assert held.rows == rows * layers
    assert held.cells == held.rows * 4
    assert held.tv == held.out == 0 < held.rewritten
    assert held.apart < apart
    base = (FAMILIES[family].fields["qk_nope_head_dim"] + latent.ROPE) ** -0.5
    yarn = 1.0 if family == "glm4_moe_lite" else (0.1 * torch.tensor(latent.YARN_FACTOR).log().item() + 1) ** 2
    (scale,) = held.scales
    assert scale == pytest.approx(base * yarn)
    assert status["latent_dim"] == latent.LATENT
    for answer in answers:
        audit = answer.summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0 < audit["outputs"]
        assert answer.summary["cells_measured"] == rows // len(PROMPTS) * layers * 4


@pytest.mark.parametrize(
    ("quantizer", "sections"),
    [
        ("int8_dither", {}),
        ("int4_token_group", {"gate": {"kind": "certified", "tau": 0.05, "tau_out": 0.2, "block_size": 4}}),
        ("int4_token_group", {"meter": {"stride": 1, "audit_every": 1, "sketch_bits": 4}}),
    ],
    ids=["dither", "gate", "sketches"],
)
def test_laws_gates_and_sketches_over_latents(
    quantizer: str, sections: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    policy = {**POLICY, "quantizer": {"name": quantizer}, **sections}
    with running_engine(checkpoints["deepseek_v3"], tmp_path, policy, max_model_len=512) as engine:
        answers = engine.ask(PROMPTS, **SAMPLING)
    for answer in answers:
        audit = answer.summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0 < audit["outputs"]
        assert answer.summary["cells_measured"] > 0
    repaired = sum(answer.summary["gate"]["repaired_blocks"] for answer in answers)
    assert (repaired > 0) == ("gate" in sections)


def test_packed_rows_by_the_engines_account(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """612 bytes a token and layer, of 1152 in bfloat16: vLLM counts them, and a pass id for each token."""
    policy = {**POLICY, "quantizer": {"name": "int8_dither", "storage": "packed"}}
    options = {"max_model_len": 512, "dtype": "bfloat16"}
    with running_engine(checkpoints["deepseek_v3"], tmp_path, policy, **options) as engine:
        answers = engine.ask(PROMPTS, **SAMPLING)
        status = engine.llm.collective_rpc("witcert_status")[0]
        blocks = engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    for answer in answers:
        audit = answer.summary["audit"]
        assert audit["violations"] == audit["mismatches"] == 0 < audit["outputs"]
        assert answer.summary["cells_measured"] == 5 * 2 * 4
    assert blocks == pytest.approx((16 << 20) / (16 * (2 * 612 + 8)), rel=0.01)
    assert status["bytes_packed_pool"] == blocks * 16 * 2 * 612
