"""Which backend vLLM would choose on a GPU, asked of vLLM's own platform code without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from engine import write_policy
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from witcert_vllm.refusals.worker import attention_layers

from witcert_core.errors import UnsupportedError

pytestmark = pytest.mark.vllm

PROBE = """
import json, sys, types
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend
from vllm.v1.attention.selector import AttentionSelectorConfig
import witcert_vllm
witcert_vllm.load()
from vllm.v1.attention.backends.registry import register_backend
register_backend(Backend.CUSTOM, "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend")  # after ours
from witcert_vllm import backend
from witcert_vllm.refusals.server import BACKENDS
backend.take_over(BACKENDS)
from vllm.platforms import cuda
chosen = {}
for capability in ((8, 0), (9, 0), (10, 0)):
    cuda.CudaPlatformBase.get_device_capability = classmethod(
        lambda cls, device_id=0, found=capability: DeviceCapability(*found))
    for wanted in (None, Backend.TRITON_ATTN, Backend.CUSTOM, Backend.FLEX_ATTENTION):
        config = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
        try:
            path = cuda.CudaPlatformBase.get_attn_backend_cls(wanted, config)
        except Exception as error:
            path = f"{type(error).__name__}: {error}"
        chosen[f"{capability[0]} {wanted and wanted.name}"] = path
        if path.startswith("witcert"):  # as vLLM will look it up
            assert resolve_obj_by_qualname(path).get_impl_cls().witcert_metered
metered = Backend.TRITON_ATTN.get_class()
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
assert issubclass(metered, TritonAttentionBackend) and issubclass(metered.get_impl_cls(), TritonAttentionImpl)
assert metered.get_impl_cls().witcert_metered and metered.get_name() == "TRITON_ATTN"
print(json.dumps(chosen))
"""


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    policy = write_policy(tmp_path_factory.mktemp("selection") / "p.yaml", quantizer={"name": "none"})
    env = {**os.environ, "WITCERT_POLICY": str(policy)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_backend_vllm_chooses_by_itself_is_metered(chosen: dict[str, str]) -> None:
    for capability in (8, 9, 10):
        assert chosen[f"{capability} None"].startswith("witcert_vllm.backend."), chosen
        for name in ("TRITON_ATTN", "CUSTOM"):
            assert chosen[f"{capability} {name}"] == f"witcert_vllm.backend.{name}"


def test_others_stay_what_they_were_and_are_refused_later(chosen: dict[str, str]) -> None:
    assert "witcert" not in chosen["9 FLEX_ATTENTION"]


def test_a_backend_that_is_not_wrapped_is_refused() -> None:
    layer = Attention.__new__(Attention)
    layer.__dict__.update(
        impl=SimpleNamespace(),
        attn_backend=SimpleNamespace(__name__="FlexAttentionBackend"),
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        head_size=64,
        head_size_v=64,
        num_heads=4,
        num_kv_heads=2,
        sliding_window=None,
    )
    compilation = SimpleNamespace(static_forward_context={"l.0": layer})
    config = SimpleNamespace(compilation_config=compilation, speculative_config=None)
    with pytest.raises(UnsupportedError, match="FlexAttentionBackend"):
        attention_layers(config)
    layer.__dict__["impl"] = SimpleNamespace(witcert_metered=True)
    assert list(attention_layers(config)) == ["l.0"]
    for changes, named in (
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
        ({"kv_sharing_target_layer_name": "l.1"}, "another layer"),
        ({"impl": SimpleNamespace(witcert_metered=True, alibi_slopes=[1.0])}, "ALiBi"),
    ):
        kept = dict(layer.__dict__)
        layer.__dict__.update(changes)
        with pytest.raises(UnsupportedError, match=named):
            attention_layers(config)
        layer.__dict__.update(kept)
