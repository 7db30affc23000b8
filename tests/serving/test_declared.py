"""What a model's files say alone: refused by name before an engine reads them, in the rows that the engines share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from witcert_core.errors import InputError, UnsupportedError
from witcert_core.policy.model import Policy
from witcert_core.serving.doctor import Finding, model_findings
from witcert_core.serving.models.declared import DeclaredModel, check_declared, described
from witcert_core.serving.models.files import config_file, declared_cache
from witcert_core.serving.models.served import DECLARED_ROWS
from witcert_core.serving.refusals import refuse
from witcert_core.serving.startup import Adapter

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PLAIN: dict[str, Any] = {"model_type": "a_new_one", "architectures": ["NewForCausalLM"], "torch_dtype": "bfloat16"}
PLAIN |= {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
INT4 = Policy(version=1, quantizer={"name": "int4_token_group"})
ENGINE = Policy(version=1, quantizer={"name": "engine"})
ADAPTER = Adapter("Engine", "no_such_engine", "1", "p", "d", "g", "c")
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**PLAIN, **changes}))
    return file


def verdict_on(file: Path, policy: Policy = INT4, kv_cache_dtype: str = "auto") -> None:
    refuse(DECLARED_ROWS, DeclaredModel.read(file, policy, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_lora_rank": 512, "index_topk": 2048},
            r"attends to the tokens that an index selects \(sparse attention\)",
        ),
        ({"compress_ratios": [4, 128], "head_dim": 128}, "keeps compressed states of several tokens"),
        ({"sparse_attention_config": {"block": 64}}, "attends to the tokens that an index selects"),
        (
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 64},
            r"chunked local attention of 64 tokens",
        ),
        ({"num_kv_shared_layers": 2}, "has layers that share the cache of others"),
        ({"state_size": 16, "num_attention_heads": None}, "has no attention"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder model"),
        ({"use_bidirectional_attention": True}, "attends both ways"),
        ({"alibi": True}, "ALiBi"),
        ({"head_dim": 528}, "has heads of 528 channels"),
        ({"head_dim": 128, "v_head_dim": 72}, "has heads of 72 channels"),
        ({"attention_layer_map": [1, 0, 1, 0]}, "is not understood here"),
    ],
)
def test_what_is_not_metered_is_refused_by_the_file_alone(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(UnsupportedError, match=rf"^NewForCausalLM:? .*{words}"):
        verdict_on(file)
    for path in (file, tmp_path):
        with pytest.raises(UnsupportedError, match=words):
            check_declared(str(path), INT4, "auto", DECLARED_ROWS)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo FP8"),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo NVFP4"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, "kv_cache_scheme of 8 bit float"),
    ],
)
@pytest.mark.parametrize("own_file", [False, True])
def test_a_checkpoint_that_declares_a_quantized_cache_is_noticed(
    declared: dict[str, Any], words: str, own_file: bool, tmp_path: Path
) -> None:
    """An engine takes it up under `--kv-cache-dtype auto`, behind the policy's quantizer."""
    file = written(tmp_path, **({} if own_file else {"quantization_config": declared}))
    if own_file:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    with pytest.raises(UnsupportedError, match=rf"declares a quantized cache \({words}\), with --kv-cache-dtype auto"):
        verdict_on(file)
    verdict_on(file, kv_cache_dtype="bfloat16")
    verdict_on(file, ENGINE)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "kv_cache_quant_algo": None},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
    ],
)
def test_weights_alone_say_nothing_of_the_cache(declared: dict[str, Any], tmp_path: Path) -> None:
    assert declared_cache({"quantization_config": declared}, tmp_path) == ""
    verdict_on(written(tmp_path, quantization_config=declared))


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_published_models_are_told_by_their_files(path: Path) -> None:
    """Each is described, and either measured in cells and bytes or refused in one line."""
    file = config_file(path)
    assert file is not None
    assert described(str(path)).startswith(json.loads(file.read_text())["architectures"][0])
    found = list(model_findings(ADAPTER, str(path), INT4, DECLARED_ROWS))
    if found[0].level == "refused":
        assert len(found) == 1
        assert "\n" not in found[0].text
    else:
        assert {"metered", "memory"} <= {finding.subject for finding in found}
        assert found[-1].text.endswith("Engine itself was not asked")


def test_which_published_models_are_refused() -> None:
    refused = {
        path.name
        for path in CONFIGS.iterdir()
        if any(finding.level == "refused" for finding in model_findings(ADAPTER, str(path), INT4, DECLARED_ROWS))
    }
    assert {"llama4_scout", "mamba2"} <= refused
    assert not refused & {"deepseek_v3", "gpt_oss_120b", "gemma3_27b", "kimi_k2", "llama31_8b", "qwen3_30b_a3b"}


def test_layers_are_told_apart() -> None:
    assert described(str(CONFIGS / "gemma3_27b")).endswith(
        "52 x window of 1024, 10 x full attention: 16 KV heads of 128 channels"
    )
    assert "61 x full attention: latents of 512 + 64 channels (MLA)" in described(str(CONFIGS / "deepseek_v3"))
    assert "36 x without a cache of tokens: 2 KV heads" in described(str(CONFIGS / "qwen3_next_80b"))
    assert "16 KV heads of 256 or 4 KV heads of 512 channels" in described(str(CONFIGS / "gemma4_31b"))


def test_what_is_not_here_or_is_no_configuration_is_left_to_the_engine(tmp_path: Path) -> None:
    check_declared("org/model", INT4, "auto", DECLARED_ROWS)
    check_declared(str(tmp_path), INT4, "auto", DECLARED_ROWS)
    (tmp_path / "config.json").write_text("{")
    check_declared(str(tmp_path), INT4, "auto", DECLARED_ROWS)
    with pytest.raises(InputError, match="is not JSON that can be read"):
        DeclaredModel.read(tmp_path / "config.json", INT4)
    (found,) = model_findings(ADAPTER, str(tmp_path), INT4, DECLARED_ROWS)
    assert (found.level, found.subject) == ("refused", "model")
    asked: list[str] = []

    def engine(path: str, _policy: Policy) -> list[Finding]:
        asked.append(path)
        return []

    assert list(model_findings(ADAPTER, str(tmp_path), INT4, DECLARED_ROWS, engine)) == []
    assert asked == [str(tmp_path)]


def test_an_engine_is_asked_once_the_files_refuse_nothing(tmp_path: Path) -> None:
    asked: list[str] = []

    def engine(path: str, _policy: Policy) -> Any:
        asked.append(path)
        return []

    file = written(tmp_path)
    assert list(model_findings(ADAPTER, str(file), INT4, DECLARED_ROWS, engine)) == []
    assert asked == [str(tmp_path)]
    written(tmp_path, alibi=True)
    assert "ALiBi" in next(iter(model_findings(ADAPTER, str(file), INT4, DECLARED_ROWS, engine))).text
    assert len(asked) == 1
