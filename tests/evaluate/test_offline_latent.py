"""Latent attention of transformers' models, absorbed: the model's own logits, and bounds over latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import witcert_core as wc
from tests.zoo import latent
from tests.zoo.family import random_model
from witcert_core.errors import UnsupportedError
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel, wrap_model
from witcert_core.policy.model import parse_policy
from witcert_core.serving.models.attention import describe

PROMPT = [1] + [3 + i * 7 % 300 for i in range(40)]


def model_of(family: str) -> Any:
    return random_model(latent.FAMILIES[family], attn_implementation="eager").eval()


def loaded(model: Any) -> LoadedModel:
    return wrap_model(model, None, describe(model.config, "m"), "m")


def engine(model: LoadedModel, name: str, **sections: Any) -> OfflineEngine:
    meter = {"stride": 1, "audit_every": 1, "max_rows": 64}
    policy = parse_policy({"version": 1, "quantizer": {"name": name}, "meter": meter, **sections})
    return OfflineEngine(model, policy, 64)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_absorbed_attention_is_the_models_own(family: str) -> None:
    model = model_of(family)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[0]
    offline = engine(loaded(model), "none")
    ours = torch.cat([offline_logits(offline, PROMPT[:30]), *(offline.forward([token]) for token in PROMPT[30:])])
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))


def offline_logits(offline: OfflineEngine, ids: list[int]) -> torch.Tensor:
    offline._start("own", len(PROMPT))
    return offline.forward(ids)


@pytest.mark.parametrize("quantizer", ["int4_token_group", "int8_dither", "fp8_e4m3_cast"])
@pytest.mark.parametrize("sections", [{}, {"prefill_reads": "stored"}], ids=["chunk", "stored"])
def test_bounds_hold(quantizer: str, sections: dict[str, Any]) -> None:
    """Here prompts that read what is stored are absorbed too, so that they are metered."""
    model = loaded(model_of("deepseek_v3"))
    _, summary = engine(model, quantizer, **sections).force("r", PROMPT, PROMPT[1:8])
    assert summary["audit"]["violations"] == summary["audit"]["mismatches"] == 0 < summary["audit"]["outputs"]
    assert (summary["rows_metered"] > len(PROMPT)) == bool(sections)
    assert summary["cells_measured"] == summary["rows_metered"] * 2 * 4
    assert summary["cells_unknown"] == 0


def test_a_users_own_model_is_left_as_it_was() -> None:
    model = model_of("deepseek_v2")
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with wc.meter(model, quantizer="int8_token_group") as meter:
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)
        (summary,) = meter.requests
    assert summary["cells_measured"] > 0
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_another_form_is_refused() -> None:
    model = model_of("deepseek_v3")
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Linear(latent.LATENT, 8, bias=False)
    with pytest.raises(UnsupportedError, match="2 layers over latents, 1 of them"):
        loaded(model)
