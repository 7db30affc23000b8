"""A prompt computed once is stored, metered and answered as if it had been computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from witcert_demo.tasks import make_samples

from witcert_core.evaluate.forcing import measuring_policy
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.evaluate.offline.prompts import PromptPass, PromptPasses, StoredLayer
from witcert_core.evaluate.settings import parse_quantizer
from witcert_core.meter.attention import AttentionSpec

SAMPLE = make_samples("multi_key", 256, 1, seed=3)[0]


@pytest.mark.parametrize("name", ["int4_token_group", "int4_token_group@4", "kivi:bits=2,residual=32", "kvquant"])
def test_a_prompt_that_is_kept_changes_nothing(twin: LoadedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = twin.model.forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["input_ids"].shape[1])
        return forward(*args, **options)

    keeping, forgetting = (replace(twin, prompts=PromptPasses(most)) for most in (2**30, 0))
    prompt, answer = twin.prompt_ids(SAMPLE.prompt), twin.answer_ids(SAMPLE.answer)
    made = []
    for loaded in (keeping, keeping, forgetting):
        monkeypatch.setattr(twin.model, "forward", forward)
        engine = OfflineEngine(loaded, measuring_policy(parse_quantizer(name)), 300)
        monkeypatch.setattr(twin.model, "forward", counted)
        calls.clear()
        made.append((engine.force("r", prompt, answer), calls.count(len(prompt))))
    computed, kept, forgotten = ((logits, summary) for (logits, summary), _ in made)
    assert [count for _, count in made] == [1, 0, 1]
    assert computed[1] == kept[1] == forgotten[1]
    assert computed[1]["cells_measured"] > 0
    assert torch.equal(computed[0], kept[0])
    assert torch.equal(computed[0], forgotten[0])


def test_what_is_generated_is_the_same(twin: LoadedModel) -> None:
    loaded, prompt = replace(twin, prompts=PromptPasses()), twin.prompt_ids(SAMPLE.prompt)
    engine = OfflineEngine(loaded, measuring_policy(parse_quantizer("fp8_e4m3_cast")), 300)
    first, second = (engine.generate("r", prompt, 12) for _ in range(2))
    assert first == second
    assert len(first.ids) > 1


def test_the_prompts_unused_longest_are_dropped() -> None:
    def made(num_tokens: int) -> PromptPass:
        k = torch.zeros(num_tokens, 1, 4)
        return PromptPass([StoredLayer(0, k, k, AttentionSpec(sm_scale=1.0))], torch.zeros(1, 8))

    kept = PromptPasses(2 * made(10).nbytes)
    for name in (1, 2):
        kept.put([name], made(10))
    assert kept.get([1]) is not None
    kept.put([3], made(10))
    assert [name for name in (1, 2, 3) if kept.get([name])] == [1, 3]
    kept.put([4], made(100))
    assert [name for name in (1, 2, 3, 4) if kept.get([name])] == [1, 3]
