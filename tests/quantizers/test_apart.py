"""Keys by one quantizer and values by another: in policies, in words, in bytes, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from witcert_core import PolicyError, QuantContext, Quantizer, QuantizerError, RotarySpec, quantizer
from witcert_core.cache.capacity import coded_bytes
from witcert_core.cli.eval import split
from witcert_core.errors import InputError
from witcert_core.evaluate.settings import base_settings, build_policy, parse_quantizer
from witcert_core.policy.model import Policy, parse_policy
from witcert_core.quantizers import REGISTRY, QuantizerRegistry
from witcert_core.quantizers.apart import KeysAndValues
from witcert_core.quantizers.coded import why_not_packed
from witcert_core.quantizers.conformance import check_quantizer

EIGHT, FOUR = REGISTRY.get("int8_token_group"), REGISTRY.get("int4_token_group", {"group_size": 16})
WRITTEN: dict[str, dict[str, Any]] = {
    "k": {"name": "int8_token_group"},
    "v": {"name": "int4_token_group", "params": {"group_size": 16}},
}


def policy(**section: Any) -> Policy:
    return parse_policy({"version": 1, "quantizer": section}, "p.yaml")


def test_a_policy_names_one_for_keys_and_one_for_values() -> None:
    for storage in ("simulated", "packed"):
        found = policy(**WRITTEN, storage=storage)
        assert found.resolved_quantizer == KeysAndValues(EIGHT, FOUR)
        assert found.quantizer.name == found.resolved_quantizer.name == "k=int8_token_group,v=int4_token_group"
        assert found.stores_parts == (storage == "packed")
    assert policy(name="none", k=None, v=None).resolved_quantizer == REGISTRY.get("none")


def test_each_kind_is_quantized_as_its_own_quantizer_does() -> None:
    both = KeysAndValues(EIGHT, FOUR)
    check_quantizer(both, 80)
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))
    ctx, places = QuantContext((0, 1), 64, RotarySpec(64), torch.bfloat16), torch.arange(5)
    kinds: dict[Any, Quantizer] = {"k": EIGHT, "v": FOUR}
    for kind, own in kinds.items():
        found, expected = (q.fake_quantize(x, kind=kind, layer=0, positions=places, ctx=ctx) for q in (both, own))
        assert torch.equal(found, expected)


def test_bytes_are_those_of_each_kind() -> None:
    both = KeysAndValues(EIGHT, FOUR)
    assert both.bytes_per_token_head(128) == 144 + 64 + 32
    assert coded_bytes(both, 128, 64) == (144, 32 + 16)
    assert why_not_packed(both) is None
    exact = KeysAndValues(REGISTRY.get("none"), FOUR)
    assert exact.bytes_per_token_head(128) == 256 + 96
    found = why_not_packed(exact)
    assert found is not None
    assert found.startswith("has a quantizer.k that has no encode and decode")
    with pytest.raises(
        PolicyError, match=r"quantizer.storage: is 'packed', but .* has a quantizer.k that has no encode"
    ):
        policy(k={"name": "none"}, v={"name": "int4_token_group"}, storage="packed")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({**WRITTEN, "name": "none"}, "p.yaml: quantizer: has k and v, and name beside them; give either"),
        ({"k": {"name": "none"}}, "p.yaml: quantizer: has only one of k and v, or one without a name"),
        ({"k": {"name": "none"}, "v": {}}, "p.yaml: quantizer: has only one of k and v, or one without a name"),
        ({**WRITTEN, "v": {"name": "int3"}}, "p.yaml: quantizer.v.name: unknown quantizer 'int3'"),
        (
            {**WRITTEN, "v": {"name": "int4_token_group", "params": {"group_size": 0}}},
            "p.yaml: quantizer.v.params: quantizer 'int4_token_group': parameters {'group_size': 0} refused",
        ),
        ({**WRITTEN, "k": {"name": "int8_dither"}}, "quantizer.k: 'int8_dither' takes keys and values together"),
        ({**WRITTEN, "v": {"name": "engine"}}, "quantizer.v: 'engine' takes keys and values together"),
    ],
)
def test_what_does_not_go_together_is_named_by_its_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        policy(**section)
    assert message in str(raised.value)


def test_both_must_wait_for_the_same_tokens() -> None:
    grouped = type("Grouped", (type(EIGHT),), {"name": "grouped", "token_group": 4, "kinds_alike": False})()
    with pytest.raises(QuantizerError, match="wait for other tokens: groups of 4 and 1"):
        KeysAndValues(grouped, FOUR)
    assert KeysAndValues(grouped, grouped).token_group == 4


def test_words_of_the_command_line() -> None:
    spec = parse_quantizer("k=int8_token_group,v=int4_token_group:group_size=16@4")
    assert (spec.section, spec.sketch_bits) == ({"k": {**WRITTEN["k"], "params": {}}, "v": WRITTEN["v"]}, 4)
    assert spec.quantizer == KeysAndValues(EIGHT, FOUR)
    built = build_policy(base_settings(None), spec, "raw")
    assert built.resolved_quantizer == spec.quantizer
    assert built.sketch_bits == 4
    words = "none,k=int8_token_group:group_size=64,v=int4_token_group,nvfp4:k_scale=2,v_scale=3,k=none,v=kivi:bits=2"
    assert split(words, brackets=True) == [
        "none",
        "k=int8_token_group:group_size=64,v=int4_token_group",
        "nvfp4:k_scale=2,v_scale=3",
        "k=none,v=kivi:bits=2",
    ]
    for text in ("k=none", "v=none", "v=none,k=none"):
        with pytest.raises(InputError, match="keys and values apart are written k=NAME,v=NAME"):
            parse_quantizer(text)


def test_a_function_can_be_one_of_the_two() -> None:
    registry = QuantizerRegistry()
    quantizer("halves", bytes=lambda head_dim: 2.0 * head_dim, registry=registry)(lambda x: (x * 2).round() / 2)
    both = KeysAndValues(registry.get("halves"), FOUR)
    check_quantizer(both)
    assert both.bytes_per_token_head(64) == 64 + 48
