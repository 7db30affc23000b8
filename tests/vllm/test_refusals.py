"""What cannot be metered is refused by name, in one line, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
import witcert_vllm
from engine import write_policy
from servers import command, environment
from vllm.config.kv_transfer import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from witcert_vllm import startup, worker
from witcert_vllm.adapter import ADAPTER
from witcert_vllm.doctor import of_model
from witcert_vllm.refusals.model import ROWS, VllmModel, untried_device
from witcert_vllm.refusals.server import (
    CACHE_ROWS,
    CONFIG_ROWS,
    DRAFT_ROWS,
    OPTIONS,
    Resolved,
    check_connector,
    check_engine_args,
    check_resolved,
)
from witcert_vllm.refusals.worker import check_specs

from witcert_core.errors import UnsupportedError
from witcert_core.policy.model import load_policy, parse_policy
from witcert_core.serving.models import served
from witcert_core.serving.refusals import refuse

pytestmark = pytest.mark.vllm
NONE = {"quantizer": {"name": "none"}}


def launch(model: Path, policy: Path, options: Sequence[str] = (), extra_path: Path | None = None) -> tuple[int, str]:
    """Exit code and output of a server that must not come up."""
    env = environment(policy)
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if extra_path is not None:
        env["PYTHONPATH"] = str(extra_path)
    done = subprocess.run(
        command(model, options), env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout + done.stderr


def refusal(code: int, output: str) -> str:
    """The one line of ours; there must be exactly one, no traceback, no engine started."""
    lines = [line for line in output.splitlines() if line.startswith("witcert:")]
    assert code != 0, output
    assert len(lines) == 1, output
    assert "Traceback" not in output
    assert "Starting to load model" not in output
    return lines[0]


def test_a_draft_model_over_packed_codes_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    speculative = json.dumps({"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2})
    policy = write_policy(tmp_path / "p.yaml", quantizer={"name": "int8_dither", "storage": "packed"})
    line = refusal(*launch(checkpoint, policy, ["--speculative-config", speculative]))
    assert "speculative decoding by 'draft_model'" in line
    assert "use the method ngram" in line


def refused_config(model: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> str:
    """The line with which making the engine's config ends this process."""
    monkeypatch.setenv("WITCERT_POLICY", str(policy))
    witcert_vllm.load()
    with pytest.raises(SystemExit, match=r"^witcert: ") as raised:
        EngineArgs(model=str(model), dtype="float32", **options).create_engine_config()
    return str(raised.value)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"quantizer": {"name": "int8_dither_bypass", "storage": "packed"}}, "MLA.*with int8_dither_bypass"),
        ({"prefill_reads": "stored", **NONE}, "MLA.*prefill_reads: stored"),
    ],
)
def test_what_latents_are_not_metered_with_stops_the_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], named: str
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    changes = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
    }
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**written, **changes}))
    assert re.search(named, refused_config(model, write_policy(tmp_path / "p.yaml", **sections), monkeypatch))


MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def test_a_cache_that_the_checkpoint_declares_stops_the_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would take it up under `--kv-cache-dtype auto`, and store FP8 behind the policy's quantizer."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    line = refused_config(model, write_policy(tmp_path / "p.yaml", **NONE), monkeypatch)
    assert "declares a quantized cache (kv_cache_quant_algo FP8), with --kv-cache-dtype auto" in line


def test_a_gate_over_a_sliding_window_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """Not a worker, whose refusal would be a line in a heap of tracebacks."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**written, **changes}))
    policy = write_policy(tmp_path / "p.yaml", **NONE, gate={"kind": "combined"})
    assert "gate.kind: combined with layers whose tokens leave the cache" in refusal(*launch(model, policy))


def test_layers_and_files_that_are_not_there(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = write_policy(tmp_path / "p.yaml", **NONE, meter={"layers": [9]})
    assert "meter.layers" in refused_config(checkpoint, policy, monkeypatch)
    policy = write_policy(tmp_path / "p.yaml", **NONE, report={"jsonl": str(tmp_path / "no" / "x")})
    assert "report.jsonl" in refused_config(checkpoint, policy, monkeypatch)


def test_a_broken_adapter_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    """The adapter's own code cannot be imported: vLLM would log that and serve unmetered."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Saboteur(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'witcert_core.policy.model':\n"
        "            raise ImportError('half installed')\n"
        "sys.meta_path.insert(0, Saboteur())\n"
    )
    line = refusal(*launch(checkpoint, write_policy(tmp_path / "p.yaml", **NONE), extra_path=tmp_path))
    assert "half installed" in line


def test_a_lost_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from witcert_vllm.hooks import Hook, apply

    with pytest.raises(UnsupportedError, match=r"LLMEngine\.no_such_thing"):
        apply(Hook("vllm.v1.engine.llm_engine.LLMEngine.no_such_thing", lambda: None, ()))


def test_an_unknown_quantizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WITCERT_POLICY", str(write_policy(tmp_path / "p.yaml", quantizer={"name": "int8_dithr"})))
    with pytest.raises(SystemExit, match=r"^witcert: .*int8_dithr.*int8_dither"):
        witcert_vllm.load()


def test_policy_with_a_typo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = write_policy(tmp_path / "p.yaml", **NONE, meter={"strid": 4})
    monkeypatch.setenv("WITCERT_POLICY", str(policy))
    with pytest.raises(SystemExit, match=r"^witcert: .*strid.*stride"):
        witcert_vllm.load()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UnsupportedError, match=r"0\.33\.0"):
        ADAPTER.check_version()


FINE = {option.name: option.allowed for option in OPTIONS}


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("pipeline_parallel_size", 2, "pipeline"),
        ("data_parallel_size", 2, "data parallelism"),
        ("decode_context_parallel_size", 2, "context"),
        ("prefill_context_parallel_size", 2, "context"),
        ("kv_offloading_size", 4.0, "--kv-offloading-size"),
        ("kv_sharing_fast_prefill", True, "shared KV"),
        ("enable_dbo", True, "dual-batch"),
        ("_api_process_count", 2, "--api-server-count 2"),
        ("scheduler_cls", "my.Scheduler", "my.Scheduler"),
        ("worker_cls", "my.Worker", "my.Worker"),
    ],
)
def test_options_refused_by_name(option: str, value: object, named: str) -> None:
    check_engine_args(SimpleNamespace(**FINE))
    with pytest.raises(UnsupportedError, match=named):
        check_engine_args(SimpleNamespace(**{**FINE, option: value}))


def test_a_server_past_the_python_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedError, match="VLLM_USE_RUST_FRONTEND"):
        check_engine_args(SimpleNamespace(**FINE))


def test_what_no_option_asked_for_is_refused() -> None:
    """VLLM_DP_SIZE makes replicas."""
    check_resolved(SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)))
    with pytest.raises(UnsupportedError, match="data parallelism"):
        check_resolved(SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2)))


@pytest.mark.parametrize(
    ("drafts", "policy", "said"),
    [
        ({"method": "extract_hidden_states"}, {}, "keep no keys and values"),
        ({"method": "dspark", "enable_adaptive_verification": True}, {}, "known on the device alone"),
        ({"method": "eagle3"}, {"quantizer": {"name": "int8_dither", "storage": "packed"}}, "pages of codes"),
        ({"method": "suffix"}, {"quantizer": {"name": "int8_dither", "storage": "packed"}}, "a prefix out of its own"),
        ({"method": "ngram"}, {"gate": {"kind": "combined", "on_exhausted": "abort"}}, "drafts that are not served"),
    ],
)
def test_drafts_refused_by_name(drafts: dict[str, Any], policy: dict[str, Any], said: str) -> None:
    def check(**of_drafts: Any) -> None:
        speculative = SimpleNamespace(**{"enable_adaptive_verification": False, **of_drafts}) if of_drafts else None
        latent = SimpleNamespace(use_mla=True)
        config = SimpleNamespace(speculative_config=speculative, model_config=latent)
        refuse(DRAFT_ROWS, Resolved(config, parse_policy({"version": 1, **NONE, **policy}), {}))

    check()
    with pytest.raises(UnsupportedError, match=rf"speculative decoding by '{drafts['method']}'.*{said}"):
        check(**drafts)


TEXT = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}


def model(text: dict[str, object] | None = None, **changes: object) -> SimpleNamespace:
    """vLLM's `ModelConfig` in what is read of it; text: fields of the model's own configuration."""
    fields = {
        "hf_config": SimpleNamespace(architectures=["M"]),
        "hf_text_config": SimpleNamespace(**{**TEXT, **(text or {})}),
        "use_mla": False,
        "model": "no/such/model",
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "dtype": torch.float32,
    }
    return SimpleNamespace(**{**fields, **changes})


def about_to_be_served(text: dict[str, object] | None = None, device: str = "cpu", **changes: object) -> VllmModel:
    return VllmModel(model(text, **changes), parse_policy({"version": 1, **NONE}), device)


def test_models_refused_by_name() -> None:
    refuse(ROWS, about_to_be_served())
    refuse(ROWS, about_to_be_served({"sliding_window": 128, "layer_types": ["full_attention"] * 2}))  # of no layer
    refuse(ROWS, about_to_be_served({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, use_mla=True))
    refuse(ROWS, about_to_be_served({"num_key_value_heads": [1, 2]}))
    texts: tuple[dict[str, object], ...] = (
        {"sliding_window": 128},
        {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]},
        {"full_attention_interval": 2, "linear_num_key_heads": 2},
        {"layer_types": ["hybrid"] * 2},
    )
    for text in texts:
        refuse(ROWS, about_to_be_served(text, is_hybrid=True))
    for changes, named in (
        ({"use_mla": True}, "MLA"),
        ({"use_mla": True, "text": {"kv_lora_rank": 520, "qk_rope_head_dim": 64}}, "multiple of 16 channels"),
        ({"runner_type": "pooling"}, "does not generate"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_diffusion": True}, "diffusion"),
        ({"is_attention_free": True}, "has no attention"),
        ({"text": {"head_dim": 72}}, "heads of 72 channels"),
        ({"text": {"kv_lora_rank": 512}}, "MLA"),
        ({"text": {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 64}}, "chunked local"),
        ({"text": {"num_kv_shared_layers": 1}}, "share the cache"),
        ({"text": {"head_dim": 192, "v_head_dim": 128}}, "different widths"),
        ({"text": {"alibi": True}}, "ALiBi"),
        ({"text": {"gated_attention_layers": [1]}}, "gated_attention_layers .* not understood"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            refuse(ROWS, about_to_be_served(**changes))
    with pytest.raises(UnsupportedError, match="TF32"):
        refuse(ROWS, about_to_be_served(device="cuda"))


@pytest.mark.parametrize("name", ["mamba2"])
def test_the_doctor_and_the_server_refuse_a_model_with_one_voice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published configurations; after the refusal the doctor speaks of no layers that it would meter."""
    path = Path(__file__).parents[1] / "data" / "configs" / name
    policy = write_policy(tmp_path / "p.yaml", **NONE)
    (finding,) = of_model(str(path), load_policy(str(policy)))
    assert finding.level == "refused"
    line = refused_config(path, policy, monkeypatch)
    assert line == f"witcert: {finding.text}"


def test_the_doctor_names_how_many_layers_keep_no_keys() -> None:
    path = Path(__file__).parents[1] / "data" / "configs" / "qwen3_next_80b"
    found = [finding.text for finding in of_model(str(path), parse_policy({"version": 1, **NONE}))]
    assert [text for text in found if text.startswith("12 of 12 layers x 16 query heads")]
    assert [text for text in found if text.startswith("36 layers that keep no keys and values")]


def test_an_error_of_ours_at_the_start_is_one_line_that_names_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served, "check_quantizer", lambda *_, **_named: dict[str, int]()["head_dim"])
    with caplog.at_level("DEBUG", "witcert_core.serving.startup"):
        line = refused_config(checkpoint, write_policy(tmp_path / "p.yaml", **NONE), monkeypatch)
    assert line.startswith("witcert: KeyError: 'head_dim' (in ")
    assert "unset WITCERT_POLICY" in line
    assert "\n" not in line
    assert "Traceback" in caplog.text


def test_the_doctor_says_that_nothing_here_has_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, until it has; the banner has the same."""
    assert untried_device("cpu") == ""
    path = str(Path(__file__).parents[1] / "data" / "configs" / "llama31_8b")
    policy = parse_policy({"version": 1, **NONE})
    assert not [finding for finding in of_model(path, policy) if finding.subject == "device"]
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type="cuda"))
    (finding,) = [finding for finding in of_model(path, policy) if finding.subject == "device"]
    assert (finding.level, finding.text) == ("note", untried_device("cuda"))
    assert "under vLLM on 'cuda' were compiled and interpreted, and never run on a GPU" in finding.text


def test_writes_of_latents_that_nobody_would_see_are_refused() -> None:
    from vllm.config.compilation import CompilationConfig

    def check(device: str, eager: bool, **changes: Any) -> None:
        compilation = CompilationConfig()
        compilation.splitting_ops = [*CompilationConfig._attention_ops, "vllm::unified_mla_kv_cache_update"]
        for name, value in changes.items():
            setattr(compilation if hasattr(compilation, name) else compilation.pass_config, name, value)
        config = SimpleNamespace(
            model_config=SimpleNamespace(use_mla=True, enforce_eager=eager),
            device_config=SimpleNamespace(device_type=device),
            compilation_config=compilation,
        )
        found = Resolved(config, parse_policy({"version": 1, **NONE}), {})
        refuse([row for row in CONFIG_ROWS if "latents" in row.what], found)

    check("cuda", eager=False)
    check("cuda", eager=True, splitting_ops=[])
    check("cpu", eager=False, splitting_ops=[])
    with pytest.raises(UnsupportedError, match="graphs that hold vllm::unified_mla_kv_cache_update"):
        check("cuda", eager=False, splitting_ops=[])
    with pytest.raises(UnsupportedError, match="fuse_rope_kvcache_cat_mla"):
        check("cuda", eager=False, fuse_rope_kvcache_cat_mla=True)


def test_caches_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    def check(cache: str, dtype: torch.dtype) -> None:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache), model_config=SimpleNamespace(dtype=dtype)
        )
        refuse(CACHE_ROWS, Resolved(config, parse_policy({"version": 1, **NONE}), {}))

    check("auto", torch.float32)
    check("bfloat16", torch.bfloat16)
    with pytest.raises(UnsupportedError, match="bfloat16 under a float32 model"):
        check("bfloat16", torch.float32)
    with pytest.raises(UnsupportedError, match=r"fp8_e5m2: .*to meter that cache"):
        check("fp8_e5m2", torch.float32)
    with pytest.raises(UnsupportedError, match=r"turboquant_k8v4: .*use --kv-cache-dtype auto"):
        check("turboquant_k8v4", torch.float32)
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    check_specs({"l": FullAttentionSpec(**shape)})
    check_specs({"l": SlidingWindowSpec(**shape, sliding_window=64)})
    with pytest.raises(UnsupportedError, match="ChunkedLocalAttentionSpec"):
        check_specs({"l": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64)})


def test_a_worker_says_in_one_line_what_it_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the layers show: vLLM's processes each add a traceback."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
    from vllm.v1.worker.worker_base import WorkerBase
    from witcert_vllm.worker import MeteredWorker

    class Stock(WorkerBase):
        def determine_available_memory(self) -> int:
            return 1 << 20

    class Worker(MeteredWorker, Stock):
        def __init__(self) -> None:
            sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
            spec = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=64)
            self.rank, self.model_runner = 0, SimpleNamespace(get_kv_cache_spec=lambda: {"l": spec})
            self.vllm_config = SimpleNamespace(speculative_config=None)

    with pytest.raises(UnsupportedError):
        Worker().determine_available_memory()
    assert capsys.readouterr().err.startswith("witcert: layer l keeps its cache as ChunkedLocalAttentionSpec")
    # An error of our own code is named likewise, one of vLLM's (here: of the stock class) is left to it.
    monkeypatch.setattr(worker, "check_specs", lambda specs: specs.no_such_thing)
    with pytest.raises(AttributeError):
        Worker().determine_available_memory()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("witcert: AttributeError: 'dict' object has no attribute 'no_such_thing' (in ")
    monkeypatch.setattr(Stock, "determine_available_memory", lambda _self: vllm.LLM(model="", nonsense=1))
    with pytest.raises(Exception, match="nonsense"):
        Worker().determine_available_memory()
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith("witcert:")]


def test_connectors() -> None:
    """One beside ours counts what it loads as unknown; where that cannot be, it is refused."""
    theirs = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    observe = parse_policy({"version": 1, **NONE})
    check_connector(theirs, observe)
    both = startup.with_connector(theirs)
    assert both.kv_connector == "MultiConnector"
    assert startup.has_own(both)
    names = [child["kv_connector"] for child in both.kv_connector_extra_config["connectors"]]
    assert names == ["WitCertConnector", "ExampleConnector"]
    alone = startup.with_connector(None)
    assert alone.kv_connector == "WitCertConnector"
    # To a consumer vLLM gives blocks back late, and it takes embeddings from clients for one.
    assert not alone.is_kv_consumer
    for policy, named in (
        ({"quantizer": {"name": "int8_dither", "storage": "packed"}}, "packed"),
        ({**NONE, "gate": {"kind": "combined"}}, "gate.kind"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            check_connector(theirs, parse_policy({"version": 1, **policy}))
