"""vLLM's own quantized caches, metered as a black box: what is read back is what its attention read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from conftest import samples_of_each_task
from engine import in_own_process, running_engine
from readback import compared_outputs
from vllm.config.cache import CacheDType
from witcert_demo.tasks import Sample
from witcert_vllm.refusals.server import ENGINE_ROWS, READ_BACK, Resolved

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import parse_policy
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.vllm

ENGINE = {"quantizer": {"name": "engine"}, "prefill_reads": "stored", "meter": {"stride": 1, "audit_every": 1}}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return samples_of_each_task(1, num_tokens=96, seed=71)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8(checkpoint: Path, tmp_path: Path, samples: list[Sample], dtype: str) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 cache on a CPU needs AVX-512")
    with running_engine(checkpoint, tmp_path, ENGINE, kv_cache_dtype=dtype) as engine, compared_outputs() as apart:
        answers = engine.ask([sample.prompt for sample in samples])
    assert len(apart) > 20
    assert max(apart) < 1e-4
    for answer in answers:
        assert answer.summary["audit"]["violations"] == answer.summary["audit"]["mismatches"] == 0
        assert answer.summary["audit"]["tv_max"] > 1e-3
        assert answer.summary["cells_unknown"] == 0 or set(answer.summary["unknown_reasons"]) == {"max_rows"}


def test_the_meter_sees_that_vllm_truncates(checkpoint: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """vLLM 0.32.0 casts to fp8 towards zero on a CPU, with up to twice the error of the nearest value."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 cache on a CPU needs AVX-512")
    asked = [samples[0].prompt]
    with running_engine(checkpoint, tmp_path / "own", ENGINE, kv_cache_dtype="fp8") as engine:
        (own,) = engine.ask(asked)
        truncated = engine.cells(own)
    cast = {**ENGINE, "quantizer": {"name": "fp8_e4m3_cast"}}
    with running_engine(checkpoint, tmp_path / "cast", cast) as engine, compared_outputs() as apart:
        (ours,) = engine.ask(asked)
        nearest = engine.cells(ours)
    assert max(apart) < 1e-4
    assert own.tokens == ours.tokens
    assert truncated.keys() == nearest.keys()
    assert sum(truncated.values()) > 1.3 * sum(nearest.values())


def test_int8_per_token_head(checkpoint: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """264 bytes at head_dim 128; vLLM reads it with Triton only, here in its interpreter."""
    options = {"kv_cache_dtype": "int8_per_token_head", "block_size": 32}
    asked = [sample.prompt for sample in samples[:1]]
    found = in_own_process(checkpoint, tmp_path, ENGINE, asked, v2=True, triton=True, options=options)
    assert found["status"]["backend"] == "TRITON_ATTN"
    assert max(found["apart"]) < 1e-4
    (answer,) = found["answers"]
    assert answer["tokens"] == list(samples[0].answer_ids)
    assert answer["summary"]["audit"]["violations"] == answer["summary"]["audit"]["mismatches"] == 0
    assert 1e-4 < answer["summary"]["audit"]["tv_max"] <= answer["summary"]["worst"]["meter"]


STOCK = "vllm.v1.attention.backends"
TRITON = {"CPU_ATTN": f"{STOCK}.triton_attn.TritonAttentionBackend"}
CPU = {"CPU_ATTN": f"{STOCK}.cpu_attn.CPUAttentionBackend"}


def check(
    stock: dict[str, str], cache: str, dtype: torch.dtype = torch.float32, reads: str = "stored", device: str = "cpu"
) -> None:
    """Whether vLLM's own cache can be metered; stock: what backends are wrapped."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype=cache),
        model_config=SimpleNamespace(dtype=dtype),
    )
    policy = parse_policy({"version": 1, "quantizer": {"name": "engine"}, "prefill_reads": reads})
    refuse(ENGINE_ROWS, Resolved(config, policy, stock))


def test_every_cache_vllm_has_is_metered_or_refused() -> None:
    """TurboQuant too, whose backend needs a GPU: vLLM itself would take its name here and store something else."""
    for dtype in READ_BACK:
        check(TRITON, dtype)
    others = set(get_args(CacheDType)) - set(READ_BACK)
    assert "turboquant_k8v4" in others
    for dtype in others:
        with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {dtype}: "):
            check(TRITON, dtype)


def test_caches_that_cannot_be_read_back_are_refused() -> None:
    check(CPU, "fp8")
    for arguments, named in (
        (("auto", torch.float32, "stored", "cpu"), "quantizes nothing"),
        (("fp8", torch.bfloat16, "stored", "cuda"), "cuda"),
        (("fp8", torch.float32, "chunk_exact", "cpu"), "prefill_reads"),
        (("int8_per_token_head", torch.float32, "stored", "cpu"), "CPU_ATTN"),
        (("turboquant_k8v4", torch.float16, "stored", "cpu"), "turboquant_k8v4.*TURBOQUANT backend.*GPU"),
        (("turboquant_3bit_nc", torch.float16, "stored", "cuda"), "turboquant_3bit_nc.*fp8_e4m3"),
        (("int4_per_token_head", torch.float32, "stored", "cpu"), "int4_per_token_head.*not known"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            check(CPU, *arguments)
