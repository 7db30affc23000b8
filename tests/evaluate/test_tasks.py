"""The generated tasks: lengths, answers, and who brings them."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from witcert_demo.run import CHECKPOINT
from witcert_demo.score import exact_match_text
from witcert_demo.task_source import NEEDLES
from witcert_demo.tasks import make_samples

from witcert_core.errors import InputError, PluginError
from witcert_core.evaluate.ruler import MAKERS, MIN_TOKENS, NATURAL
from witcert_core.evaluate.task_registry import choose_source, choose_tasks, task_sources
from witcert_core.evaluate.tasks import EvalSample, score


@pytest.fixture(scope="module")
def symbols() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize("num_tokens", [800, 4096])
@pytest.mark.parametrize("task", NATURAL.tasks)
def test_a_prompt_fills_its_length_and_its_own_answer_is_right(
    task: str, num_tokens: int, bpe: PreTrainedTokenizerFast
) -> None:
    first, second = NATURAL.samples(task, num_tokens, 2, 7, bpe)
    for sample in (first, second):
        used = len(bpe.encode(sample.prompt, add_special_tokens=False))
        assert num_tokens - 130 < used <= num_tokens
        assert score(sample, sample.answer) == 1.0
        assert score(sample, "nothing of the kind") == 0.0
        assert len(bpe.encode(sample.answer, add_special_tokens=False)) <= sample.max_new_tokens
    assert first.prompt != second.prompt
    assert NATURAL.samples(task, num_tokens, 1, 7, bpe)[0] == first
    assert NATURAL.samples(task, num_tokens, 1, 8, bpe)[0] != first


def sample_of(task: str, bpe: PreTrainedTokenizerFast) -> tuple[EvalSample, str]:
    """A sample and its text, without the question."""
    (sample,) = NATURAL.samples(task, 3000, 1, 0, bpe)
    return sample, sample.prompt.partition("Question:")[0]


def test_needles_are_in_the_text(bpe: PreTrainedTokenizerFast) -> None:
    for task, count in (("single_needle", 1), ("multi_value", 4), ("multi_query", 4)):
        sample, text = sample_of(task, bpe)
        hidden = dict.fromkeys(re.findall(r"code numbers for \w+ is (\d{7})\.", text))
        assert set(hidden) == set(sample.expected)
        assert len(hidden) == count
    sample, text = sample_of("multi_key", bpe)
    pairs = re.findall(r"code numbers for (\w+) is (\d{7})\.", text)
    assert len(pairs) > 20
    (asked,) = re.findall(r"code number for (\w+) in the text above", sample.prompt)
    assert [value for key, value in pairs if key == asked] == list(sample.expected)


def test_chains_can_be_followed(bpe: PreTrainedTokenizerFast) -> None:
    sample, text = sample_of("variable_tracking", bpe)
    (value,) = re.findall(r"assigned the value (\d+)", sample.prompt)
    known: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        known[name] = known.get(source, source)  # in order of the text: the source is always known by then
    assert len(known) == 10
    assert [name for name, ends in known.items() if ends == value] == list(sample.expected)


@pytest.mark.parametrize(("task", "pattern"), [("common_words", r"\d+\. (\w+)"), ("frequent_words", r"\b(\w+)\b")])
def test_the_words_asked_for_are_the_most_frequent(task: str, pattern: str, bpe: PreTrainedTokenizerFast) -> None:
    for size in (1, 5, 60):
        draft = MAKERS[task](Random(3), size)
        text = draft.prompt.partition("Question:")[0].partition("\n\n")[2]
        found = re.findall(pattern, text)
        ranked = sorted(set(found), key=found.count, reverse=True)
        most = len(draft.expected)
        assert set(ranked[:most]) == set(draft.expected)
        assert found.count(ranked[most - 1]) > found.count(ranked[most])


def test_one_document_answers(bpe: PreTrainedTokenizerFast) -> None:
    for sample in NATURAL.samples("question_answering", 1500, 12, 0, bpe):
        documents = [d for d in sample.prompt.partition("Question:")[0].split("\n\n") if d.startswith("Document")]
        question = sample.prompt.partition("Question:")[2]
        clues = set(re.findall(r"\b[A-Z]\w{4,}\b|\b1\d{3}\b", question)) - {"Answer", "Which"}
        (own,) = [d for d in documents if any(re.search(rf"\b{clue}\b", d) for clue in clues)]
        assert sample.expected[0] in own


def test_scoring() -> None:
    two = EvalSample("t", "p", ("12", "Ab"), "", "all")
    assert [score(two, text) for text in ("12 and AB", "ab", "1 2")] == [1.0, 0.5, 0.0]
    assert score(EvalSample("t", "p", ("12", "ab"), "", "any"), "ab") == 1.0
    exact = EvalSample("t", "p", ("a b",), "", "exact")
    assert [score(exact, text) for text in ("a  b ", "a b c", "A b")] == [1.0, 0.0, 0.0]


def test_impossible_requests_are_refused(bpe: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="unknown task"):
        NATURAL.samples("poetry", 1000, 1, 0, bpe)
    with pytest.raises(InputError, match=f"at least {MIN_TOKENS}"):
        NATURAL.samples("multi_key", 100, 1, 0, bpe)
    with pytest.raises(InputError, match="has no task 'multikey'"):
        choose_tasks(NATURAL, ["multikey"])
    assert choose_tasks(NATURAL, []) == NATURAL.tasks


def test_the_demonstrations_tasks_are_a_source_of_their_own(symbols: Any) -> None:
    for task in NEEDLES.tasks:
        ours, theirs = NEEDLES.samples(task, 128, 3, 5, symbols), make_samples(task, 128, 3, 5)
        for sample, known in zip(ours, theirs, strict=True):
            assert symbols.encode(sample.prompt, add_special_tokens=False) == list(known.prompt_ids)
            assert symbols.encode(sample.answer, add_special_tokens=False) == list(known.answer_ids)
            shown = symbols.decode(list(known.answer_ids), skip_special_tokens=True)
            for output in (shown, shown + " w00", shown[:-1]):
                assert score(sample, output) == float(exact_match_text(known, output))


def test_the_source_follows_the_tokenizer(bpe: PreTrainedTokenizerFast, symbols: Any) -> None:
    assert choose_source("auto", bpe).name == "natural"
    assert choose_source("auto", symbols).name == "needles"
    assert choose_source("natural", symbols).name == "natural"
    with pytest.raises(InputError, match=r"unknown task source 'neddles' \(did you mean 'needles'"):
        choose_source("neddles", symbols)


def test_sources_are_checked_when_they_are_found() -> None:
    def found(value: str) -> list[EntryPoint]:
        return [EntryPoint("x", value, "witcert.tasks")]

    assert list(task_sources(found("witcert_demo.task_source:NEEDLES"))) == ["needles", "natural"]
    for value, why in (
        ("no_such_module:X", "failed to load"),
        ("witcert_demo.tasks:TASKS", "is no task source"),
        ("witcert_core.evaluate.ruler:NATURAL", "is taken"),
    ):
        with pytest.raises(PluginError, match=why):
            task_sources(found(value))
