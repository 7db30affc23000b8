"""What cannot be metered is refused by name, in one line, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import witcert_sglang
from conftest import write_policy
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from transformers import LlamaConfig
from witcert_demo.servers import server_environment
from witcert_sglang import startup, windows, worker
from witcert_sglang.adapter import ADAPTER
from witcert_sglang.doctor import of_model
from witcert_sglang.refusals.model import NO_CLASS, ROWS, SglangModel
from witcert_sglang.refusals.server import BACKENDS, OPTIONS, Server, check_options, check_port
from witcert_sglang.refusals.worker import check_layers, check_pool
from witcert_sglang.startup import is_main_process

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import Policy, parse_policy
from witcert_core.serving.models.served import check_served
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.sglang
NONE = {"quantizer": {"name": "none"}}
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def launch(model: Path, policy: Path, options: Sequence[str] = (), extra_path: Path | None = None) -> tuple[int, str]:
    """Exit code and output of a server that must not come up; it is given two minutes to refuse."""
    env = server_environment(policy)
    if extra_path is not None:
        env["PYTHONPATH"] = str(extra_path)
    entry = Path(sys.executable).with_name("sglang")
    command = [str(entry), "serve", "--model-path", str(model), "--device", "cpu", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr


def refusal(code: int, output: str, traces: bool = False) -> str:
    """The one line of ours; there must be exactly one, no traceback (unless SGLang logs its own), nothing started."""
    lines = [line for line in output.splitlines() if line.startswith("witcert:")]
    assert code != 0, output
    assert len(lines) == 1, output
    assert traces or "Traceback" not in output
    assert "Load weight" not in output
    return lines[0]


def changed_config(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_unknown_quantizer(checkpoint: Path, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "p.yaml", quantizer={"name": "int8_dithr"})
    line = refusal(*launch(checkpoint, policy))
    assert "int8_dithr" in line
    assert "int8_dither" in line


def test_policy_with_a_typo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = write_policy(tmp_path / "p.yaml", **NONE, meter={"strid": 4})
    monkeypatch.setenv("WITCERT_POLICY", str(policy))
    with pytest.raises(SystemExit, match=r"^witcert: .*strid.*stride"):
        witcert_sglang.load()


def test_policy_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITCERT_POLICY", str(tmp_path / "p.yaml"))
    with pytest.raises(SystemExit, match=r"^witcert: .*p\.yaml"):
        witcert_sglang.load()


def test_missing_model(tmp_path: Path) -> None:
    line = refusal(*launch(tmp_path / "nowhere", write_policy(tmp_path / "p.yaml", **NONE)))
    assert "nowhere" in line


def test_layers_and_files_that_are_not_there(checkpoint: Path, tmp_path: Path) -> None:
    """Found before a model is loaded; of two wrongs the first is named."""
    policy = write_policy(
        tmp_path / "p.yaml", **NONE, meter={"layers": [9]}, report={"jsonl": str(tmp_path / "no" / "x")}
    )
    assert "meter.layers" in refusal(*launch(checkpoint, policy))
    policy = write_policy(tmp_path / "p.yaml", **NONE, report={"jsonl": str(tmp_path / "no" / "x")})
    assert "report.jsonl" in refusal(*launch(checkpoint, policy))


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnsupportedError, match=f"--port {port}"):
            check_port("127.0.0.1", port)


def test_a_hybrid_model_stops_the_server(tmp_path: Path) -> None:
    """In one line, before a scheduler builds its pools: one whose states SGLang does not know, as published."""
    line = refusal(*launch(CONFIGS / "jamba", write_policy(tmp_path / "p.yaml", **NONE)))
    assert line.startswith("witcert: JambaForCausalLM has layers without a KV cache (28 of 32): ")


def on_import_of(module: str, statements: str) -> str:
    """A sitecustomize that runs `statements` in every process just before `module` is imported."""
    return (
        "import sys, importlib.abc\n"
        "class Saboteur(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            {statements}\n"
        "sys.meta_path.insert(0, Saboteur())\n"
    )


def test_a_lost_hook_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """An SGLang whose private function has gone: SGLang would log it and serve unmetered."""
    breakage = "from sglang.srt.managers.scheduler import Scheduler; del Scheduler.get_init_info"
    (tmp_path / "sitecustomize.py").write_text(on_import_of("witcert_sglang.plugin", breakage))
    line = refusal(*launch(checkpoint, write_policy(tmp_path / "p.yaml", **NONE), extra_path=tmp_path), traces=True)
    assert "get_init_info" in line


def test_a_broken_adapter_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """The adapter's own code cannot be imported: SGLang would log that and serve unmetered."""
    (tmp_path / "sitecustomize.py").write_text(
        on_import_of("witcert_core.policy.model", "raise ImportError('half installed')")
    )
    line = refusal(*launch(checkpoint, write_policy(tmp_path / "p.yaml", **NONE), extra_path=tmp_path))
    assert "half installed" in line


CHILD = """
import multiprocessing, sys
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    args = ServerArgs(model_path=sys.argv[1], device="cpu", dp_size=2)
    child = multiprocessing.get_context("spawn").Process(target=launch_server, args=(args,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_server_in_a_child_process_is_refused_alike(checkpoint: Path, tmp_path: Path) -> None:
    """Programs start servers in processes of their own: who the parent is says nothing about what a process serves."""
    (tmp_path / "program.py").write_text(CHILD)
    env = server_environment(write_policy(tmp_path / "p.yaml", **NONE))
    command = [sys.executable, str(tmp_path / "program.py"), str(checkpoint)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert "--dp-size 2" in refusal(done.returncode, done.stdout + done.stderr)


def test_workers_are_told_by_what_they_run() -> None:
    def run_scheduler_process() -> bool:
        return is_main_process()

    assert is_main_process()
    assert not run_scheduler_process()


FINE = {option.name: option.allowed for option in OPTIONS} | {
    "kv_cache_dtype": "auto",
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "device": "cpu",
    "tp_size": 1,
    "disable_radix_cache": True,
    "speculative_algorithm": None,
    "speculative_eagle_topk": None,
}


def asked(policy: Mapping[str, object] | None = None, **options: Any) -> Server:
    """A server started with these options, under a policy of these sections."""
    return Server(SimpleNamespace(**{**FINE, **options}), policy_of(**(policy or {})))


def test_plain_options_pass() -> None:
    check_options(asked())


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("pp_size", 2, "pipeline"),
        ("dp_size", 2, "data parallelism"),
        ("attn_dp_size", 2, "data-parallel attention"),
        ("nnodes", 2, "several nodes"),
        ("radix_cache_backend", "mine", "prefix cache of another make"),
        ("enable_hierarchical_cache", True, "HiCache"),
        ("enable_lmcache", True, "LMCache"),
        ("disaggregation_mode", "prefill", "disaggregation"),
        ("enable_torch_compile", True, "torch.compile"),
        ("tokenizer_worker_num", 2, "tokenizer"),
        ("smg_grpc_mode", True, "gRPC"),
        ("grpc_mode", True, "gRPC"),
        ("is_embedding", True, "embedding"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8_e4m3"),
        ("attention_backend", "fa3", "fa3"),
        ("decode_attention_backend", "flashinfer", "flashinfer"),
        ("enable_pdmux", True, "PD multiplexing"),
        ("enable_mis", True, "multi-item"),
    ],
)
def test_options_refused_by_name(option: str, value: object, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_options(asked(None, **{option: value}))


EAGLE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}


@pytest.mark.parametrize(
    ("options", "policy", "named"),
    [
        ({"speculative_algorithm": "NGRAM"}, {}, "--speculative-algorithm NGRAM"),
        ({"speculative_eagle_topk": 4}, {}, "--speculative-eagle-topk 4.*ancestors"),
        ({}, {"quantizer": {"name": "int8_dither", "storage": "packed"}}, "hold codes as well"),
        ({}, {"gate": {"kind": "combined", "on_exhausted": "abort"}}, "drafts that are not served"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"quantizer": {"name": "engine"}}, "its kernels read as stored"),
    ],
)
def test_drafts_refused_by_name(options: dict[str, Any], policy: dict[str, Any], named: str) -> None:
    check_options(asked(None, **EAGLE))
    with pytest.raises(UnsupportedError, match=named):
        check_options(asked({**NONE, **policy}, **{**EAGLE, **options}))


def test_a_server_past_the_python_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UnsupportedError, match="SGLANG_RUST_SERVER"):
        check_options(asked())


PACKED = {"quantizer": {"name": "int8_dither", "storage": "packed"}}


@pytest.mark.parametrize(
    ("sections", "decode", "prefill", "options", "flag"),
    [
        (PACKED, "full", "disabled", {}, None),
        (NONE, "disabled", "disabled", {}, None),
        (NONE, "full", "disabled", {"device": "cpu", "attention_backend": "torch_native"}, None),
        (NONE, "full", "disabled", {}, "storage: packed.*--disable-cuda-graph"),
        (PACKED, "full", "breakable", {}, "--disable-prefill-cuda-graph"),
        (PACKED, "breakable", "disabled", {}, "--cuda-graph-backend-decode full"),
        (PACKED, "disabled", "full", {}, "--disable-prefill-cuda-graph"),
        ({**PACKED, "meter": {"audit_every": 4}}, "full", "disabled", {}, "audit_every"),
        ({**PACKED, "meter": {"sketch_share": 0.1}}, "full", "disabled", {}, "sketch_share"),
        ({**PACKED, "gate": {"kind": "certified"}}, "full", "disabled", {}, "gate.kind: certified"),
        (PACKED, "full", "disabled", {"attention_backend": "torch_native"}, "--attention-backend triton"),
        (PACKED, "full", "disabled", {"decode_attention_backend": "torch_native"}, "--attention-backend triton"),
    ],
)
def test_graphs_are_metered_or_refused_with_the_flag_that_helps(
    sections: dict[str, object], decode: str, prefill: str, options: dict[str, object], flag: str | None
) -> None:
    phases = SimpleNamespace(decode=SimpleNamespace(backend=decode), prefill=SimpleNamespace(backend=prefill))
    on_gpu = {"device": "cuda", "attention_backend": "triton", "cuda_graph_config": phases}
    with nullcontext() if flag is None else pytest.raises(UnsupportedError, match=flag):
        check_options(asked(sections, **{**on_gpu, **options}))


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = asked(attention_backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="use --attention-backend torch_native"):
        check_options(triton)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_options(triton)


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_backends_of_a_gpu_are_metered_there_alone(backend: str) -> None:
    phases = SimpleNamespace(decode=SimpleNamespace(backend="disabled"), prefill=SimpleNamespace(backend="disabled"))
    on_gpu = {"device": "cuda", "attention_backend": backend, "cuda_graph_config": phases}
    check_options(asked(None, **on_gpu))
    with pytest.raises(UnsupportedError, match=r"'trtllm_mha': it is not wrapped .*; use .*flashinfer or fa3"):
        check_options(asked(None, **on_gpu | {"decode_attention_backend": "trtllm_mha"}))
    refused = pytest.raises(UnsupportedError, match=f"{backend}.*use --attention-backend triton")
    with nullcontext() if backend == "triton" else refused:
        check_options(asked(PACKED, **on_gpu))


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_their_calls_go_through_the_meter(name: str) -> None:
    """Stubs of the classes that need a GPU: the registry's factory is wrapped, and so are both forward methods."""
    from witcert_sglang.backend import metered_factory

    calls: list[tuple[str, bool]] = []

    class Stub(AttentionBackend):
        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
            return "decoded"

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
            return "extended"

        def get_fused_kv_write_buffers(self, layer, forward_batch):  # type: ignore[no-untyped-def]
            return "buffers"

    def attend_layer(run, q, k, v, layer, batch, save, is_decode, kwargs, backend):  # type: ignore[no-untyped-def]
        calls.append((run(q, k, v, layer, batch, save_kv_cache=save, **kwargs), is_decode))

    def made(*_: Any) -> Any:
        return SimpleNamespace(attend_layer=attend_layer)

    factory = metered_factory(lambda _runner: Stub(), made)
    assert type(factory(SimpleNamespace(is_draft_worker=True))) is Stub  # what makes drafts is left alone
    backend = factory(SimpleNamespace(is_draft_worker=False))
    backend.forward_decode(1, 2, 3, None, None)
    backend.forward_extend(1, 2, 3, None, None, save_kv_cache=True)
    assert calls == [("decoded", True), ("extended", False)]
    assert backend.get_fused_kv_write_buffers(None, None) is None
    assert isinstance(backend, Stub)
    assert name in BACKENDS


def backend_of(name: str, window: int | None = None) -> object:
    return type(name, (), {"sliding_window_size": window})()


def test_windows_and_caps_that_a_backend_does_not_follow_are_refused() -> None:
    """Whichever of two backends it is, and whatever the configuration calls them: the layers say what they ask for."""
    windowed = RadixAttention(2, 64, 0.1, num_kv_heads=2, layer_id=0, sliding_window_size=16)
    capped = RadixAttention(2, 64, 0.1, num_kv_heads=2, layer_id=0, logit_cap=30.0)
    windows.check_backend([windowed, capped], backend_of("TritonAttnBackend", 16))
    windows.check_backend([windowed, capped], backend_of("FlashAttentionBackend"))
    windows.check_backend([windowed], backend_of("TorchNativeAttnBackend"))
    with pytest.raises(UnsupportedError, match="first chunks; use --attention-backend triton"):
        windows.check_backend([windowed], backend_of("FlashInferAttnBackend", 16))
    with pytest.raises(UnsupportedError, match="caps its logits at 30: SGLang's torch_native backend ignores the cap"):
        windows.check_backend([capped], backend_of("TorchNativeAttnBackend"))
    with pytest.raises(UnsupportedError, match="a window of 17 tokens under a TritonAttnBackend that reads 13 of them"):
        windows.check_backend([windowed], backend_of("TritonAttnBackend", 12))
    with pytest.raises(UnsupportedError, match="not one whose windows and logit caps are known"):
        windows.check_backend([windowed], backend_of("SomeOtherBackend"))


def test_the_table_of_windows_is_sglangs_own() -> None:
    """SGLang's tests of its backends keep the same two lists: whose decode rows see one token less."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

    layer = RadixAttention(2, 64, 0.1, num_kv_heads=2, layer_id=0, sliding_window_size=16)
    less, whole = kit._SWA_DECODE_MIN_SEQ_LEN_WINDOW, kit._SWA_DECODE_EXTEND_WINDOW
    assert "triton" in less
    assert {"torch_native", "fa3", "flashinfer"} <= whole
    assert set(BACKENDS) <= less | whole
    for backend, decoded in ((TritonAttnBackend, 15), (TorchNativeAttnBackend, 16)):
        assert windows.window_left(backend, layer, True) == decoded
        assert windows.window_left(backend, layer, False) == 16
    layer.sliding_window_size = -1
    assert windows.window_left(TritonAttnBackend, layer, True) == -1


def test_an_abort_on_several_ranks_is_refused() -> None:
    gates = {end: {**NONE, "gate": {"kind": "certified", "on_exhausted": end}} for end in ("serve", "abort")}
    check_options(asked(gates["serve"], tp_size=2))
    with pytest.raises(UnsupportedError, match="part ways"):
        check_options(asked(gates["abort"], tp_size=2))


def test_packed_storage_beside_a_cache_dtype() -> None:
    check_options(asked(PACKED))
    check_options(asked(kv_cache_dtype="bf16"))
    with pytest.raises(UnsupportedError, match="bf16"):
        check_options(asked(PACKED, kv_cache_dtype="bf16"))


def test_outliers_in_sixteen_bit_need_a_model_of_it() -> None:
    def bypass(pairs: int) -> dict[str, object]:
        return {"quantizer": {"name": "int8_dither_bypass", "params": {"pairs": pairs}, "storage": "packed"}}

    narrow: dict[str, Any] = {"text": {"head_dim": 16}}
    check_served(served(bypass(8), dtype=torch.bfloat16, **narrow), KNOWN)
    check_served(served({"quantizer": {"name": "int8_dither"}}, dtype=torch.float32), KNOWN)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        check_served(served(bypass(8), dtype=torch.float32), KNOWN)
    with pytest.raises(UnsupportedError, match="9 channel pairs of a head of 16 channels, which has 8"):
        check_served(served(bypass(9), dtype=torch.float16, **narrow), KNOWN)


def model_config(**changes: Any) -> SimpleNamespace:
    """SGLang's `ModelConfig` in what is read of it; text: fields of the model's own configuration."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    hf_config = LlamaConfig(architectures=["M"], **{**sizes, **changes.pop("text", {})})
    fields = {
        "hf_config": hf_config,
        "hf_text_config": hf_config,
        "model_path": "no/such/model",
        "attention_arch": AttentionArch.MHA,
        "linear_attn_registry_result": None,
        "is_draft_model": False,
        "is_hybrid_swa": False,
        "num_attention_layers": 2,
        "dtype": torch.float32,
    }
    return SimpleNamespace(**{**fields, **changes})


KNOWN = [row for row in ROWS if row is not NO_CLASS]
"""Without the question whether SGLang has a class for an architecture, which these have not."""


def served(
    policy: Mapping[str, object] | None = None,
    backend: str = "torch_native",
    kv_cache_dtype: str = "auto",
    device: str = "cpu",
    **changes: object,
) -> SglangModel:
    """A model of two layers with these changes, about to be served."""
    return SglangModel(
        model_config(**changes), policy_of(**(policy or {})), device, backend, kv_cache_dtype=kv_cache_dtype
    )


def test_models_refused_by_name() -> None:
    capped = {"text": {"attn_logit_softcapping": 50.0}}
    refuse(KNOWN, served())
    refuse(KNOWN, served(backend="triton", text=capped["text"]))
    refuse(KNOWN, served(backend="triton", text={"sliding_window": 128}))  # in the ordinary pool
    latents = {"attention_arch": AttentionArch.MLA, "text": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}
    refuse(KNOWN, served(backend="triton", **latents))
    shapes = {"sliding_window": 9, "sliding_window_pattern": 2, "swa_num_key_value_heads": 4, "v_head_dim": 32}
    refuse(KNOWN, served(backend="triton", text=shapes))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"backend": "fa3"}, "MLA.*with fa3"),
        ({"policy": {**NONE, "prefill_reads": "stored"}}, "prefill_reads: stored"),
        ({"policy": {"quantizer": {"name": "int8_dither", "storage": "packed"}}}, "MLA.*storage: packed"),
        ({"policy": {"quantizer": {"name": "kvquant"}}}, "MLA.*before RoPE"),
    )
    for options, named in cases:
        with pytest.raises(UnsupportedError, match=named):
            refuse(KNOWN, served(**{"backend": "triton", **options}, **latents))
    refuse(KNOWN, served(backend="triton", is_hybrid_swa=True, text={"sliding_window": 128}))
    for changes, named in (
        (capped, "attn_logit_softcapping"),
        ({"policy": PACKED, "text": {"v_head_dim": 128}}, "different widths"),
        ({"text": {"head_dim": 72}}, "heads of 72 channels"),
        ({"attention_arch": AttentionArch.MLA}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
        ({"attention_arch": AttentionArch.SSM}, "has no attention"),
        ({"text": {"kv_lora_rank": 512}}, "not by both"),
        ({"text": {"kv_lora_rank": 512, "index_topk": 2048}}, "an index selects"),
        ({"text": {"num_kv_shared_layers": 1}}, "share the cache"),
        ({"text": {"layer_types": ["linear_attention", "full_attention"]}}, r"without a KV cache \(1 of 2\)"),
        ({"text": {"attn_layer_period": 2}}, "without a KV cache"),
        ({"text": {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 64}}, "chunked local"),
        ({"text": {"is_causal": False}}, "both ways"),
        ({"text": {"alibi": True}}, "ALiBi"),
        ({"text": {"gated_attention_layers": [1]}}, "gated_attention_layers .* not understood"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            refuse(KNOWN, served(**changes))


def policy_of(**sections: object) -> Policy:
    return parse_policy({"version": 1, **(sections or NONE)})


SERVED = {  # of the published configurations
    *("chatglm3", "deepseek_v3", "gemma2_9b", "gemma3_27b", "glm46", "gpt2", "hd112", "kimi_k2", "llama31_8b"),
    *("minicpm_decoupled", "mistral7b_v01", "mistral_small31_vlm", "mistral_small_24b", "phi2", "phi3mini", "phi4"),
    *("qwen25_7b", "qwen25_vl_7b_flat", "qwen3_30b_a3b", "smollm3_norope", "gpt_oss_120b", "gpt_oss_120b_bf16"),
    *("qwen3_next_80b", "qwen3_next_80b_lt", "gemma4_31b"),
}
REFUSED = {
    "decilm_nemotron51b": r"layers without a KV cache \(20 of 80\)",
    "jamba": r"layers without a KV cache \(28 of 32\)",
    "llama4_scout": r"chunked local attention of 8192 tokens \(36 of 48\)",
    "mamba2": "keeps a state a request",
    "minimax_text": r"layers without a KV cache \(70 of 80\)",
    "mqa_falcon7b": "FalconForCausalLM has no SGlang implementation",
}


def test_a_cache_that_the_checkpoint_declares_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """SGLang would take it up under `--kv-cache-dtype auto`, and store FP8 behind the policy's quantizer."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    declared = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (model / "hf_quant_config.json").write_text(json.dumps(declared))
    args = SimpleNamespace(model_path=str(model), kv_cache_dtype="auto", json_model_override_args="{}")
    with pytest.raises(SystemExit, match=r"^witcert: .*declares a quantized cache \(kv_cache_quant_algo FP8\)"):
        startup.MainProcess(policy_of()).before_resolve(args)


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_the_doctor_and_the_server_have_one_verdict(path: Path) -> None:
    """Of every published configuration; after a refusal the doctor speaks of no layers that it would meter."""
    found = list(of_model(str(path), policy_of()))
    args = SimpleNamespace(model_path=str(path), kv_cache_dtype="auto", attention_backend="triton", device="cpu")
    if path.name in SERVED:
        assert {finding.level for finding in found} <= {"ok", "note"}
        assert [finding.subject for finding in found][:3] == ["model", "head size", "metered"]
        startup.check_model(policy_of(), ModelConfig(str(path)), args)
        return
    (finding,) = found
    assert finding.level == "refused"
    assert re.search(REFUSED[path.name], finding.text), finding.text
    if path.name not in ("decilm_nemotron51b", "minimax_text"):  # which SGLang cannot read
        with pytest.raises(UnsupportedError) as raised:
            startup.check_model(policy_of(), ModelConfig(str(path)), args)
        assert str(raised.value) == finding.text


def test_models_of_our_own_making(tmp_path: Path) -> None:
    """Kinds that no published configuration here is of."""
    llama = json.loads((CONFIGS / "llama31_8b" / "config.json").read_text())
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM cannot be served by this SGLang"),
        ({"layers_block_type": ["attention", "mamba"] * 16}, r"without a KV cache \(16 of 32\)"),
        ({"hybrid_override_pattern": "M*" * 16}, r"without a KV cache \(16 of 32\)"),
        ({"swa_layer_schedule": "LG" * 16}, "swa_layer_schedule .* not understood"),
        ({"model_type": "gemma3n", "architectures": ["Gemma3nForCausalLM"]}, "share the cache of others"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, "encoder-decoder"),
        ({"architectures": ["LLaDA2MoeModelLM"]}, "generates by diffusion"),
        ({"num_attention_heads": "many"}, "cannot be read"),
    )
    for number, (changes, named) in enumerate(cases):
        path = tmp_path / str(number)  # SGLang keeps what it has read, by path
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**llama, **changes}))
        (finding,) = of_model(str(path), policy_of())
        assert finding.level == "refused"
        assert re.search(named, finding.text), finding.text
        assert "\n" not in finding.text


def real_pools() -> dict[str, object]:
    """Pools of SGLang's own that are made up of others."""
    sizes = {"size": 16, "page_size": 1, "dtype": torch.float32, "head_num": 2, "head_dim": 64, "device": "cpu"}
    return {
        "HybridLinearKVPool": HybridLinearKVPool(full_attention_layer_ids=[1], mamba_pool=None, **sizes),
        "SWAKVPool": SWAKVPool(size_swa=8, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **sizes),
    }


@pytest.mark.parametrize("name", ["HybridLinearKVPool", "SWAKVPool"])
@pytest.mark.parametrize("quantizer", ["none", "engine"])
def test_a_pool_of_pools_is_named_before_it_is_looked_into(
    name: str, quantizer: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a scheduler: the pool's class comes before the model's layers, and one line is all there is."""
    policy = policy_of(quantizer={"name": quantizer}, prefill_reads="stored")
    server = worker.SchedulerProcess(policy)
    args = SimpleNamespace(kv_cache_dtype="auto", attention_backend="torch_native", device="cpu")
    monkeypatch.setattr(worker, "checked_options", lambda _policy, _args: args)
    runner = SimpleNamespace(
        server_args=args,
        token_to_kv_pool=real_pools()[name],
        model_config=ModelConfig(str(checkpoint)),
        model=torch.nn.Module(),
        dtype=torch.float32,
    )
    said = "the model has attention layers" if quantizer == "none" else f"quantizer.name: engine in a {name}: "
    with pytest.raises(SystemExit, match=f"^witcert: {said}"):
        server.make_runtime(runner, None)


def test_an_error_of_ours_at_the_start_is_one_line_that_names_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = worker.SchedulerProcess(policy_of())
    monkeypatch.setattr(server, "build_runtime", lambda *_: MHATokenToKVPool.layer_number)
    with (
        caplog.at_level("DEBUG", "witcert_core.serving.startup"),
        pytest.raises(SystemExit, match=r"^witcert: AttributeError: .*'layer_number' \(in ") as raised,
    ):
        server.make_runtime(None, None)
    assert "unset WITCERT_POLICY" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "Traceback" in caplog.text


def test_a_pool_narrower_than_the_model_is_refused() -> None:
    refuse(KNOWN, served(backend="triton", kv_cache_dtype="bf16", dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match="bf16 under a float32 model"):
        refuse(KNOWN, served(backend="triton", kv_cache_dtype="bf16"))


def test_pools_refused_by_name() -> None:
    pool = SimpleNamespace(kv_cache_layout="nhd", dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        check_pool(pool, policy_of(), torch.float32)


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ADAPTER.check_version()
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(UnsupportedError, match=r"0\.6\.0"):
        ADAPTER.check_version()


def attention_layer(layer_id: int, **changes: object) -> torch.nn.Module:
    layer: torch.nn.Module = RadixAttention(2, 64, 0.125, num_kv_heads=1, layer_id=layer_id)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def test_layers_refused_by_name() -> None:
    heads = {"head_num": 1, "head_dim": 64, "v_head_dim": 64}
    one, two = (SimpleNamespace(start_layer=0, layer_num=count, **heads) for count in (1, 2))
    check_layers(torch.nn.ModuleList([attention_layer(0), attention_layer(1)]), two)
    with pytest.raises(UnsupportedError, match="2 or 4 query heads"):
        check_layers(torch.nn.ModuleList([attention_layer(0), attention_layer(1, tp_q_head_num=4)]), two)
    wide = SimpleNamespace(start_layer=0, layer_num=1, **{**heads, "head_dim": 128})
    with pytest.raises(UnsupportedError, match=r"\(1, 64, 64\) in a pool for \(1, 128, 64\)"):
        check_layers(torch.nn.ModuleList([attention_layer(0)]), wide)
    with pytest.raises(UnsupportedError, match=r"pool of layers \[0\]"):
        check_layers(torch.nn.ModuleList([attention_layer(0), attention_layer(1)]), one)
    with pytest.raises(UnsupportedError, match="belongs to one"):
        check_layers(torch.nn.ModuleList([attention_layer(0), attention_layer(0)]), two)
    for changes, named in (
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"use_irope": True}, "iRoPE"),
        ({"xai_temperature_len": 1024}, "temperature"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            check_layers(torch.nn.ModuleList([attention_layer(0, **changes)]), one)


def test_of_two_layers_over_latents_the_absorbed_one_is_metered() -> None:
    def over_latents(layer_id: int) -> list[torch.nn.Module]:
        absorbed = RadixAttention(2, 80, 0.1, num_kv_heads=1, layer_id=layer_id, v_head_dim=64)
        return [absorbed, RadixAttention(2, 24, 0.1, num_kv_heads=2, layer_id=layer_id)]

    pool = SimpleNamespace(start_layer=0, layer_num=2, kv_lora_rank=64, kv_cache_dim=80)
    found = check_layers(torch.nn.ModuleList([*over_latents(0), *over_latents(1)]), pool)
    assert [(layer.layer_id, layer.v_head_dim) for layer in found] == [(0, 64), (1, 64)]


def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="TF32"):
        refuse(KNOWN, served(backend="triton", device="cuda"))
