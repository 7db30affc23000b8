"""`wc.meter`: a user's own generate(), in padded batches and with sampling, metered as each request alone would be."""

from __future__ import annotations

import copy
import doctest
import json
import threading
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from test_offline import FAMILIES, SIZES, policy, random_model
from torch import Tensor
from transformers import DynamicCache
from witcert_demo.tasks import make_samples

import witcert_core as wc
from witcert_core.errors import InputError, UnsupportedError
from witcert_core.evaluate.offline.engine import OfflineEngine
from witcert_core.evaluate.offline.metered import MeteredModel
from witcert_core.evaluate.offline.model import LoadedModel
from witcert_core.report.schema import load_schema

OF_A_NAME = {"request_id", "engine"}


def padded(prompts: list[list[int]], side: str) -> dict[str, Tensor]:
    """A batch with its attention mask; padding is token 0."""
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        pad = [0] * (longest - len(prompt))
        rows.append(pad + prompt if side == "left" else prompt + pad)
        masks.append([0] * len(pad) + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * len(pad))
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def assert_alike(mine: Any, theirs: Any, rel: float, where: str = "") -> None:
    """Two summaries but for who made them; numbers up to the order in which a batch is multiplied."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), where
        for key in theirs.keys() - OF_A_NAME:
            assert_alike(mine[key], theirs[key], rel, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), where
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_alike(one, other, rel, f"{where}[{number}]")
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=rel, abs=1e-6), where
    elif ".forms." in where and rel > 0.01:  # where values differ by that much, another form may be the smallest
        assert abs(mine - theirs) <= 2, where
    else:
        assert mine == theirs, where


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    return [list(make_samples("multi_key", length, 1, length)[0].prompt_ids) for length in lengths]


@pytest.mark.parametrize(
    ("name", "sections", "rel"),
    [
        ("int4_token_group", {}, 1e-3),
        ("kivi", {}, 1e-3),
        ("kvquant", {}, 0.05),  # its levels are fitted, to keys that differ in their last bits
        ("int4_token_group", {"prefill_reads": "stored"}, 1e-3),
        ("fp8_e4m3_cast", {"gate": {"kind": "certified"}}, 1e-3),
        ("int8_dither", {}, 1e-3),
    ],
)
def test_a_padded_batch_is_metered_as_its_requests_alone(
    twin: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, sections: dict[str, Any], rel: float
) -> None:
    """Also when one ends before the others, and is fed padding until they do."""
    monkeypatch.setattr("secrets.randbits", lambda _bits: 5)
    prompts = prompts_of((120, 160, 97))
    chosen = policy(name, **sections)
    with wc.meter(twin.model, policy=chosen) as m:
        out = twin.model.generate(**padded(prompts, "left"), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert len(m.requests) == 3
    for number, prompt in enumerate(prompts):
        alone = OfflineEngine(twin, chosen, 256).generate("alone", prompt, 10)
        assert out[number, 160:].tolist()[: len(alone.ids)] == alone.ids
        jsonschema.validate(m.summary(number), load_schema("request"))
        assert_alike(m.summary(number), alone.summary, rel)
        assert m.summary(number)["audit"]["violations"] == m.summary(number)["audit"]["mismatches"] == 0
        assert m.summary(number)["audit"]["cells"] > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_cache_generates_and_scores_what_the_model_does(family: str, side: str) -> None:
    model = random_model(family)
    inputs = padded([list(range(5, 17)), list(range(20, 25)), [9]], side)
    options = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        plain = model(**inputs).logits
        torch.manual_seed(3)
        expected = model.generate(**inputs, **options)
        with wc.meter(model, policy=policy("none")) as m:
            scored = model(**inputs).logits
            torch.manual_seed(3)
            if side == "right" and FAMILIES[family].get("sliding_window") is not None:
                with pytest.raises(
                    UnsupportedError, match=r"a window of \d tokens that would count it; .* on the left"
                ):
                    model.generate(**inputs, **options)
                return
            sampled = model.generate(**inputs, **options)
        again = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(scored[real], plain[real], atol=2e-5, rtol=2e-5)
    assert torch.equal(again, plain)
    assert torch.equal(sampled, expected)
    assert [summary["rows_metered"] for summary in m.requests] == [0, 0, 0, 7, 7, 7]
    for summary in m.requests[3:]:
        assert summary["audit"]["cells"] == summary["cells_exact"] > 0
        assert summary["audit"]["mismatches"] == summary["audit"]["violations"] == summary["cells_unknown"] == 0


def test_padding_behind_a_text_is_no_row_of_it_and_unknown_where_it_reads_what_is_stored() -> None:
    model = random_model("LlamaConfig")
    inputs = padded([list(range(5, 17)), list(range(20, 25))], "right")
    with torch.no_grad(), wc.meter(model, policy=policy("int4_token_group", prefill_reads="stored")) as m:
        model(**inputs)
    full, short = m.requests
    assert (full["rows_metered"], short["rows_metered"]) == (12, 5)
    assert full["cells_unknown"] == 0
    assert short["unknown_reasons"] == {"padding": 2 * 4}


def test_several_calls_and_one_that_goes_on_from_a_cache() -> None:
    model = random_model("LlamaConfig")
    ids = torch.arange(10, 30)[None]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with wc.meter(model, quantizer="int8_dither", max_tokens=64) as m:
        for _ in range(4):  # more than there is room for at a time
            model.generate(ids, **options)
        first = model.generate(ids, return_dict_in_generate=True, **options)
        assert m.requests[4]["finish_reason"] is None
        more = torch.cat([first.sequences, torch.arange(40, 46)[None]], 1)
        model.generate(more, past_key_values=first.past_key_values, **options)
        cache = first.past_key_values
    assert [summary["finish_reason"] for summary in m.requests] == ["length"] * 5
    assert [summary["rows_metered"] for summary in m.requests[:4]] == [4] * 4
    assert m.requests[4]["rows_metered"] == 7 + 4  # the law no longer holds of the 4 before
    assert m.requests[4]["cells_unknown"] == 4 * 2 * 4
    assert m.requests[4]["tier"] == "deterministic"
    assert "after an answer of its own" in m.requests[4]["claim"]
    assert m.requests[4]["audit"]["violations"] == 0
    with pytest.raises(UnsupportedError, match="under a meter that has ended"):
        model.generate(more, past_key_values=cache, **options)


def test_a_prompt_in_chunks_is_one_prompt(twin: LoadedModel) -> None:
    prompts = prompts_of((70, 50))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with wc.meter(twin.model, policy=policy("int4_token_group")) as m:
        twin.model.generate(**padded(prompts, "left"), prefill_chunk_size=20, **options)
    for number, _ in enumerate(prompts):
        chunks = (50, 30)[number]  # rows of its later chunks; the first of the shorter one is padding
        assert m.summary(number)["rows_metered"] == chunks + 5
        assert m.summary(number)["audit"]["violations"] == m.summary(number)["cells_unknown"] == 0


def test_a_model_is_what_it_was_after_the_block_also_after_an_error(tmp_path: Any) -> None:
    model = random_model("Qwen3Config")
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        before = model(ids).logits
        names = dict(model.__dict__)
        streamer = SimpleNamespace(put=lambda _tokens: 1 / 0, end=lambda: None)
        with pytest.raises(ZeroDivisionError), wc.meter(model, quantizer="int4_token_group"):
            model.generate(ids, max_new_tokens=3, pad_token_id=0, streamer=streamer)
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with wc.meter(model, quantizer="int4_token_group", jsonl=tmp_path / "r.jsonl", max_tokens=64) as m:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    model.generate(ids, max_new_tokens=3, pad_token_id=0)
            handle.remove()
            model.generate(ids, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "eager"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model.__dict__.keys() == names.keys()
    assert [summary["rows_metered"] for summary in m.requests] == [0, 0, 0, 2]
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert lines == m.requests


def refused(metered: MeteredModel, model: Any, what: str) -> None:
    ids, fed = torch.arange(10, 30)[None], {"pad_token_id": 0, "max_new_tokens": 4}
    if what == "beams":
        model.generate(ids, num_beams=2, **fed)
    elif what == "lookup":
        model.generate(ids, prompt_lookup_num_tokens=3, **fed)
    elif what == "static":
        model.generate(ids, cache_implementation="static", **fed)
    elif what == "no cache":
        model.generate(ids, use_cache=False, **fed)
    elif what == "gradients":
        with torch.enable_grad():
            model(ids)
    elif what == "mask":
        model(ids, attention_mask=torch.zeros(1, 1, 20, 20))
    elif what == "hidden":
        out = model(ids, use_cache=True)
        model(ids[:, :1], past_key_values=out.past_key_values, attention_mask=torch.tensor([[0] * 20 + [1]]))
    elif what == "packed":
        model(ids, position_ids=torch.tensor([[*range(12), *range(8)]]))
    elif what == "cropped":
        model(ids, use_cache=True).past_key_values.crop(-2)
    elif what == "room":
        model(torch.arange(50)[None])
    elif what == "attentions":
        model(ids, output_attentions=True)
    elif what == "layers alone":
        model.model(ids)
    elif what == "nested":
        with wc.meter(random_model("LlamaConfig"), quantizer="none"):
            pass
    elif what == "number":
        metered.summary(7)
    elif what == "copied":
        copy.deepcopy(model(ids, use_cache=True).past_key_values)
    elif what == "filled":
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
        model(ids, past_key_values=cache)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("beams", UnsupportedError, "beam search .* num_beams=1"),
        ("lookup", UnsupportedError, "assisted generation takes tokens back"),
        ("static", UnsupportedError, "cache_implementation is 'static'"),
        ("no cache", UnsupportedError, "use_cache is False"),
        ("gradients", UnsupportedError, r"torch\.no_grad"),
        ("mask", UnsupportedError, r"the attention mask is \(1, 1, 20, 20\); the meter follows padding only"),
        ("hidden", UnsupportedError, "hides other places than when they were cached"),
        ("packed", UnsupportedError, "several texts in one row"),
        ("cropped", UnsupportedError, "takes tokens back out of the cache"),
        ("room", InputError, "room for 40 tokens, 40 of them free, and the pass brings 50"),
        ("attentions", UnsupportedError, "is given output_attentions"),
        ("layers alone", UnsupportedError, "outside a pass of the meter"),
        ("nested", UnsupportedError, "a meter is running already"),
        ("number", InputError, "there is no request 7"),
        ("copied", UnsupportedError, "cache of a metered model is copied or stored"),
        ("filled", UnsupportedError, "filled outside the meter"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(what: str, error: type[Exception], words: str) -> None:
    model = random_model("LlamaConfig")
    with torch.no_grad(), wc.meter(model, quantizer="int4_token_group", max_tokens=40) as m:
        with pytest.raises(error, match=words):
            refused(m, model, what)
        model(torch.arange(10, 30)[None])  # and the meter goes on
    with torch.no_grad(), wc.meter(model, quantizer="int4_token_group"):
        pass


def windowed(name: str, layers: list[str] | None = None) -> Any:
    """A model whose window is in the mask that it makes, and not in what it hands to attention."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 32, "sliding_window": 6}
    sizes |= {"shared_expert_intermediate_size": 32, "num_experts_per_tok": 1, "use_sliding_window": True}
    sizes |= {} if layers is None else {"layer_types": layers}
    config = getattr(transformers, name)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("name", "layers"), [("PhimoeConfig", None), ("Qwen2MoeConfig", ["full_attention", "sliding_attention"])]
)
def test_a_window_that_a_model_keeps_in_its_mask_is_refused(name: str, layers: list[str] | None) -> None:
    """It would attend to all tokens under the meter, and to six without it: bounds would be of another attention."""
    model, ids = windowed(name, layers), torch.arange(10, 30)[None]
    with torch.no_grad():
        plain = model(ids[:, :5]).logits
        with (
            wc.meter(model, policy=policy("none")) as m,
            pytest.raises(UnsupportedError, match=r"the last 6 tokens: it"),
        ):
            model(ids)
        assert m.requests[0]["rows_seen"] == 0
        with wc.meter(model, policy=policy("none"), max_tokens=6):  # where the window reaches over everything
            torch.testing.assert_close(model(ids[:, :5]).logits, plain, atol=2e-5, rtol=2e-5)


def test_an_encoder_attends_both_ways_and_is_refused() -> None:
    """Its layers say so of themselves; under the meter, without the mask it makes, they would attend as a decoder's."""
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, is_decoder=False)
    model, ids = transformers.BertLMHeadModel(config).eval(), torch.arange(10, 30)[None]
    with torch.no_grad(), wc.meter(model, quantizer="none"), pytest.raises(UnsupportedError, match="is_causal False"):
        model(ids)


def test_a_layer_of_another_shape_than_its_configuration_says_is_refused() -> None:
    model = random_model("LlamaConfig")
    model.config.num_attention_heads = 8  # its layers have 4, and 2 rows would be taken for one
    with (
        torch.no_grad(),
        wc.meter(model, quantizer="none"),
        pytest.raises(UnsupportedError, match=r"\[\(4, 16\), \(2, 16\), \(2, 16\)\] \(heads, channels\), but"),
    ):
        model(torch.arange(10, 30)[None])


def test_padding_inside_a_text_counts_for_no_window_and_is_followed_without_one() -> None:
    ids, mask = torch.arange(10, 30)[None], torch.ones(1, 20, dtype=torch.int64)
    mask[0, 10:12] = 0
    with torch.no_grad():
        plain = random_model("LlamaConfig")
        expected = plain(ids, attention_mask=mask).logits
        with wc.meter(plain, policy=policy("none")):
            scored = plain(ids, attention_mask=mask).logits
        torch.testing.assert_close(scored[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=2e-5)
        model = random_model("MistralConfig")
        with (
            wc.meter(model, policy=policy("none")),
            pytest.raises(UnsupportedError, match="padding between the tokens"),
        ):
            model(ids, attention_mask=mask)


def test_another_thread_waits_for_its_turn_or_is_refused() -> None:
    """Attention is told of one pass, and would take the calls of another thread's for its own."""
    model, ids = random_model("LlamaConfig"), torch.arange(10, 30)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    refused: list[str] = []

    def other(*_: Any) -> None:
        try:
            model.generate(ids, **options)
        except UnsupportedError as error:
            refused.append(str(error))

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with wc.meter(model, quantizer="none") as m:
        handle = model.model.layers[0].register_forward_hook(meanwhile)
        assert torch.equal(model.generate(ids, **options), expected)
        handle.remove()
        meanwhile()  # nobody else is at it now
    assert len(refused) == 4
    assert all("which follows one pass at a time" in words for words in refused)
    assert [summary["rows_metered"] for summary in m.requests] == [3, 3]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None, "quantizer": "none"}, "the model is NoneType; expected a causal language model"),
        ({"model": "gpt2", "quantizer": "none"}, "the model is str; expected"),
        ({"model": None, "quantizer": policy("none").resolved_quantizer}, "expected a name, such as 'int8_dither'"),
        ({"model": None, "quantizer": "none", "max_tokens": 0.5}, "max_tokens is 0.5; expected"),
    ],
    ids=str,
)
def test_what_is_no_argument_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words), wc.meter(given.pop("model"), **given):
        pass


def test_models_and_arguments_are_refused_in_the_words_used_elsewhere() -> None:
    model = random_model("LlamaConfig")
    with pytest.raises(InputError, match="either quantizer or policy"):
        wc.meter(model)
    with pytest.raises(InputError, match="jsonl goes with quantizer"):
        wc.meter(model, policy=policy("none"), jsonl="x")
    with pytest.raises(UnsupportedError, match="on_exhausted is 'abort'"):
        wc.meter(model, policy=policy("int4_token_group", gate={"kind": "certified", "on_exhausted": "abort"}))
    with (
        pytest.raises(UnsupportedError, match="encoder-decoder"),
        wc.meter(
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            quantizer="none",
        ),
    ):
        pass
    chunked = transformers.LlamaConfig(**SIZES, layer_types=["chunked_attention"] * 2)
    with (
        pytest.raises(UnsupportedError, match="chunked local attention"),
        wc.meter(transformers.LlamaForCausalLM(chunked), quantizer="none"),
    ):
        pass
    meant = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to("meta")
    with (
        pytest.raises(UnsupportedError, match="is on meta; metered here is the CPU"),
        wc.meter(meant, quantizer="none"),
    ):
        pass


def test_the_example_of_its_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(wc.meter, "meter", globs={})
    assert doctest.DocTestRunner().run(example).failed == 0
