"""Bytes a token and tokens that fit, against the published figures and the adapter's own account."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from witcert_demo.run import CHECKPOINT

from witcert_core.cache.bands import band_map
from witcert_core.cache.capacity import side_bytes_per_head, side_bytes_per_token
from witcert_core.cache.witness_store import WitnessStore
from witcert_core.cli import main
from witcert_core.errors import InputError, QuantizerError, UnsupportedError
from witcert_core.evaluate.capacity import bytes_per_token, capacity, parse_memory, read_shape
from witcert_core.quantizers import REGISTRY
from witcert_core.quantizers.rotary import RotarySpec
from witcert_core.serving.models.attention import CacheLayer, ModelAttention, describe

# An 8-billion-parameter Llama: 32 layers, 8 KV heads of 128 channels.
EIGHT_B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
SHAPE = describe(EIGHT_B, "test")
PASS_ID = 8
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def test_bytes_of_the_layouts() -> None:
    heads = 32 * 8
    assert bytes_per_token("fp16", SHAPE) == 512 * heads == 131072
    assert bytes_per_token("fp8", SHAPE) == 256 * heads
    assert bytes_per_token("int8_dither", SHAPE) == 272 * heads + PASS_ID
    assert bytes_per_token("int8_dither_w", SHAPE) == 276 * heads + PASS_ID
    assert bytes_per_token("bypass:4", SHAPE) == 288 * heads + PASS_ID
    assert bytes_per_token("bypass:0", SHAPE) == bytes_per_token("int8_dither", SHAPE)
    found = capacity("int8_dither", SHAPE, parse_memory("40GB"))
    assert found.tokens == 40 * 10**9 // (272 * heads + PASS_ID)
    assert found.ratio == pytest.approx(1.8824, abs=3e-4)  # 272 of 512, and the pass id


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_ranks_share_the_heads(tp: int, heads: int) -> None:
    assert bytes_per_token("fp16", SHAPE, tp) == 512 * 32 * heads
    assert bytes_per_token("int8_dither", SHAPE, tp) == 272 * 32 * heads + PASS_ID


@pytest.mark.parametrize("name", REGISTRY.names())
@pytest.mark.parametrize("storage_bytes", [2, 4])
def test_side_bytes_are_those_of_the_store(name: str, storage_bytes: int) -> None:
    rotary = RotarySpec(80)
    quantizer = REGISTRY.get(name)
    if quantizer.space != "post_rope" or quantizer.token_group != 1 or quantizer.state != "none":
        pytest.skip("kept by another store")
    store = WitnessStore(
        quantizer=quantizer,
        layers=(0, 3),
        num_slots=5,
        num_kv_heads=2,
        head_dim=80,
        v_head_dim=80,
        bands=band_map(rotary),
        storage_dtype={2: torch.bfloat16, 4: torch.float32}[storage_bytes],
    )
    per_head = side_bytes_per_head(quantizer, rotary, 80, storage_bytes, bands=16)
    assert store.nbytes == 5 * (side_bytes_per_token(per_head, 2, 2) - PASS_ID)


def test_a_metered_pool_pays_for_its_witnesses() -> None:
    plain, metered = bytes_per_token("fp16", SHAPE), bytes_per_token("metered:fp8_e4m3_cast", SHAPE)
    assert metered == plain + 32 * 8 * 33 + PASS_ID
    waiting = bytes_per_token("metered:kivi", SHAPE)  # and a flag for each token whose group is open
    assert waiting == plain + 32 * 8 * 17 + PASS_ID + 1
    sketched = bytes_per_token("metered:int4_token_group:group_size=64@4", SHAPE)
    assert sketched == plain + 32 * 8 * (17 + 64 + 16 + 64 + 16) + PASS_ID


def test_codes_and_their_witness_are_what_a_packed_pool_pays_for() -> None:
    """int4 is 3.2 times as many tokens as 16 bit, less the witness: 17 bytes beside 160."""
    assert bytes_per_token("packed:int4_token_group", SHAPE) == 32 * 8 * (160 + 17) + PASS_ID
    assert bytes_per_token("packed:fp8_e4m3_cast", SHAPE, 8) == 32 * (256 + 33) + PASS_ID
    assert bytes_per_token("packed:int2_token_group:group_size=128@4", SHAPE) == 32 * 8 * (72 + 17 + 160) + PASS_ID
    with pytest.raises(InputError, match="write int8_dither_w alone"):
        bytes_per_token("packed:int8_dither_w", SHAPE)
    with pytest.raises(QuantizerError, match="'kivi' stores 32 tokens together"):
        bytes_per_token("packed:kivi", SHAPE)
    with pytest.raises(UnsupportedError, match="int8_dither alone has packed storage"):
        bytes_per_token("packed:int4_token_group", read_shape(CONFIGS / "deepseek_v3"))


def test_latents_are_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """61 rows of 576 channels, on every rank: values are read out of them."""
    shape = read_shape(CONFIGS / "deepseek_v3")
    for tp in (1, 8):
        assert bytes_per_token("fp16", shape, tp) == 61 * 2 * 576
        assert bytes_per_token("fp8", shape, tp) == 61 * 576
        metered = bytes_per_token("metered:int4_token_group", shape, tp)
        assert metered == 61 * (2 * 576 + 36 + 1) + PASS_ID
        assert bytes_per_token("int8_dither", shape, tp) == 61 * (576 + 2 * 18) + PASS_ID
    with pytest.raises(UnsupportedError, match="not of latents"):
        bytes_per_token("bypass:4", shape)
    assert main(["capacity", "--config", str(CONFIGS / "deepseek_v3"), "--memory", "40GB"]) == 0
    assert "61 layers x 576 channels of a latent and RoPE" in capsys.readouterr().out


def test_configurations(tmp_path: Path) -> None:
    shape = read_shape(CHECKPOINT)
    assert shape.layers == tuple(CacheLayer(index, 2, 64, 64) for index in range(4))
    assert shape.layers == read_shape(CHECKPOINT / "config.json").layers
    nested = tmp_path / "config.json"
    nested.write_text(json.dumps({"text_config": {**EIGHT_B, "partial_rotary_factor": 0.5}}))
    assert read_shape(tmp_path).rotary_dim == 64
    with pytest.raises(InputError, match="has no num_hidden_layers"):
        describe({}, "x")
    with pytest.raises(InputError, match="cannot be read"):
        read_shape(tmp_path / "none.json")


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_transformers_and_the_file_itself_say_the_same(path: Path) -> None:
    """Of published models: what the configuration class derives, and the same without Transformers."""

    def said(read: Callable[[], ModelAttention]) -> object:
        try:
            found = read()
        except UnsupportedError as error:
            return str(error)
        return found.layers, found.kinds, found.num_hidden_layers, found.rotary_dim

    file = path / "config.json"
    assert said(lambda: read_shape(path)) == said(lambda: describe(json.loads(file.read_text()), str(file)))


def test_layers_of_other_shapes_and_other_kinds_are_counted_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    for name, size, note in (
        ("gemma4_31b", 901_120, "50 layers have a window (of 1024 tokens)"),
        ("qwen3_next_80b", 24_576, "36 of 48 layers keep no keys and values"),
        ("mistral7b_v01", 131_072, "32 layers have a window (of 4096 tokens)"),
    ):
        command = ["capacity", "--config", str(CONFIGS / name), "--memory", "40GB"]
        assert main([*command, "--layout", "fp16", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["layouts"][0]["bytes_per_token"] == size
        assert found["notes"][0].startswith(note)
        assert main(command) == 0  # every layout
        assert note in capsys.readouterr().out
    gemma = read_shape(CONFIGS / "gemma4_31b")
    assert bytes_per_token("int8_dither", gemma) == 50 * 16 * 544 + 10 * 4 * 1088 + PASS_ID
    assert bytes_per_token("fp16", gemma, 2) == 901_120 // 2


def test_what_has_no_such_cache_gets_its_own_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    for kind, why in (("t5", "encoder-decoder"), ("mamba2", "keeps a state a request"), ("gemma3n", None)):
        transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
        code = main(["capacity", "--config", str(tmp_path), "--memory", "40GB"])
        said = capsys.readouterr()
        if why is None:
            assert code == 0
            assert "15 of 35 layers use the cache of others" in said.out
        else:
            (line,) = said.err.splitlines()
            assert code == 2
            assert why in line


@pytest.mark.parametrize(("text", "size"), [("40GB", 40 * 10**9), ("1.5 GiB", 3 * 2**29), ("7", 7), ("2kb", 2000)])
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["9" * 400 + "GB", "9" * 4400, "40G", "-1GB", "٤GB"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="memory is"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0; expected an integer from 1"),
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"head_dim": 64.0}, "head_dim is 64.0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"v_head_dim": "x"}, "v_head_dim is 'x'"),
        ({"layer_types": [["full_attention"]]}, "expected a list of words"),
        ({"layer_types": 5}, "expected a list of words"),
        ({"layer_types": ["mamba"] * 32}, "no layer with a cache"),
        ({"layer_types": ["mamba"]}, "layer_types names 1 layers, but there are 32"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "Transformers cannot read it as a llama model"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan"),
        ({"text_config": None}, "NoneType is where a mapping is expected"),
    ],
)
def test_an_odd_configuration_is_one_line(
    changed: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EIGHT_B, **changed}))
    assert main(["capacity", "--config", str(tmp_path), "--memory", "1GB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n": ' + "9" * 5000 + "}"])
def test_json_that_cannot_be_read_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["capacity", "--config", str(tmp_path), "--memory", "1GB"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--config", str(CHECKPOINT), "--memory", "1MB", "--layout", "fp16", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["layouts"]
    assert row == {"layout": "fp16", "bytes_per_token": 4 * 2 * 256, "tokens": 488, "ratio": 1.0}
    assert main(["capacity", "--config", str(CHECKPOINT), "--memory", "1MB"]) == 0
    assert "int8_dither_w" in capsys.readouterr().out
    bypassed = ["--memory", "1MB", "--layout", "metered:int8_dither_bypass"]
    unknown, undivided = ["--memory", "1MB", "--layout", "int3"], ["--memory", "1MB", "--tp", "3"]
    for wrong in (["--memory", "40 apples"], unknown, undivided, bypassed):
        assert main(["capacity", "--config", str(CHECKPOINT), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
