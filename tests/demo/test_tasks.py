"""The needle tasks: exact lengths, answers that follow from the prompt, strict scoring."""

from __future__ import annotations

import numpy as np
import pytest
from witcert_demo import vocabulary as vocab
from witcert_demo.documents import Lookup, Plan, render
from witcert_demo.score import accuracy, exact_match, exact_match_text
from witcert_demo.tasks import TASKS, make_samples
from witcert_demo.training.curriculum import CURRICULUM, batch_of_step, num_steps


def is_key(token_id: int) -> bool:
    return vocab.FIRST_KEY <= token_id < vocab.FIRST_FILLER


def is_value(token_id: int) -> bool:
    return vocab.FIRST_VALUE <= token_id < vocab.FIRST_KEY


def read_answer(context: list[int], asked: list[int]) -> list[int]:
    """The answer a reader of the document gives, found without the generator's knowledge."""
    follows: dict[int, list[int]] = {}
    position = 0
    while position < len(context):
        if is_key(context[position]):
            assert context[position] not in follows
            alias = is_key(context[position + 1])
            follows[context[position]] = context[position + 1 : position + (2 if alias else 3)]
            position += 3
        else:
            position += 1
    answer: list[int] = []
    for key in asked:
        answer.append(key)
        while len(follows[key]) == 1:
            key = follows[key][0]
            answer.append(key)
        assert all(is_value(value) for value in follows[key])
        answer += follows[key]
    return [*answer, vocab.END]


@pytest.mark.parametrize("num_tokens", [48, 63, 512, 1984])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_the_length_asked_for_and_imply_their_answer(task: str, num_tokens: int) -> None:
    for sample in make_samples(task, num_tokens, 5, seed=3):
        ids = list(sample.prompt_ids)
        assert len(ids) == num_tokens
        assert vocab.encode(sample.prompt) == ids
        assert vocab.encode(sample.answer) == list(sample.answer_ids)
        ask = ids.index(vocab.ASK)
        assert ids[-1] == vocab.COLON
        assert read_answer(ids[1:ask], ids[ask + 1 : -1]) == list(sample.answer_ids)


def test_tasks_differ_in_what_they_ask() -> None:
    answers = {task: make_samples(task, 256, 1, seed=0)[0].answer_ids for task in TASKS}
    assert {task: len(answer) for task, answer in answers.items()} == {
        "single_needle": 4,
        "multi_key": 4,
        "multi_query": 13,
        "variable_tracking": 6,
    }
    keys_in = {task: sum(is_key(token) for token in make_samples(task, 256, 1, seed=0)[0].prompt_ids) for task in TASKS}
    assert keys_in["single_needle"] == 2
    assert keys_in["multi_key"] > 10


def test_a_longer_list_begins_with_the_shorter_one_and_seeds_differ() -> None:
    assert make_samples("multi_key", 64, 5, seed=1)[:2] == make_samples("multi_key", 64, 2, seed=1)
    assert make_samples("multi_key", 64, 2, seed=1) != make_samples("multi_key", 64, 2, seed=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("needles", 64, 1), "unknown task 'needles'; allowed are single_needle"),
        (("multi_key", 20, 1), "num_tokens is 20; allowed are 48..1984"),
        (("multi_key", 64, -1), "count is -1"),
    ],
)
def test_wrong_requests_are_named(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_samples(*arguments, seed=0)


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="5 records do not fit a context of 14 tokens"):
        render(np.random.default_rng(0), 1, Plan(14, 5), [Lookup((0,))])


def test_a_context_may_be_filled_to_the_last_token() -> None:
    batch = render(np.random.default_rng(0), 3, Plan(15, 5), [Lookup((2,))])
    assert all(is_key(int(token)) for token in batch.ids[:, 1:16:3].flatten())


@pytest.mark.parametrize("step", [310, 800, 1200, 1800])
def test_training_batches_mark_exactly_the_answers(step: int) -> None:
    batch = batch_of_step(CURRICULUM, seed=0, step=step)
    assert batch.is_answer[:, batch.first_answer].all()
    assert not batch.is_answer[:, : batch.first_answer].any()
    for ids, is_answer in zip(batch.ids[:3].tolist(), batch.is_answer[:3].tolist(), strict=True):
        ask = ids.index(vocab.ASK)
        context, position = ids[1:ask], ask
        while position < len(ids):
            colon = ids.index(vocab.COLON, position)
            answer = read_answer(context, ids[position + 1 : colon])
            end = colon + 1 + len(answer)
            assert ids[colon + 1 : end] == answer
            assert is_answer[position:end] == [False] * (colon + 1 - position) + [True] * len(answer)
            position = end


def test_copying_answers_repeat_the_phrase() -> None:
    batch = batch_of_step(CURRICULUM, seed=0, step=0)
    period = batch.first_answer - 2
    assert (batch.ids[:, 1 + period :] == batch.ids[:, 1:-period]).all()


def test_batches_depend_on_seed_and_step_alone_and_end_with_the_curriculum() -> None:
    assert (batch_of_step(CURRICULUM, 0, 400).ids == batch_of_step(CURRICULUM, 0, 400).ids).all()
    first, other = batch_of_step(CURRICULUM, 0, 0).ids, batch_of_step(CURRICULUM, 1, 0).ids
    assert first.shape != other.shape or (first != other).any()
    with pytest.raises(ValueError, match="past the curriculum's last step"):
        batch_of_step(CURRICULUM, 0, num_steps(CURRICULUM))


def test_scoring_is_strict() -> None:
    sample = make_samples("multi_key", 64, 1, seed=0)[0]
    answer = list(sample.answer_ids)
    wrong = [answer[0], answer[1], vocab.FIRST_VALUE + (answer[2] - vocab.FIRST_VALUE + 1) % 100, vocab.END]
    assert exact_match(sample, answer)
    assert exact_match(sample, answer[:-1])
    assert exact_match(sample, [*answer, vocab.PAD])
    for output in (wrong, answer[1:], answer[:-2], [*answer[:-1], answer[1], vocab.END], []):
        assert not exact_match(sample, output)
        assert not exact_match_text(sample, vocab.decode(output))
    assert exact_match_text(sample, " " + sample.answer)
    assert exact_match_text(sample, vocab.decode(answer[:-1]))
    assert accuracy([True, False]) == 0.5
    with pytest.raises(ValueError, match="no outcomes"):
        accuracy([])


def test_words_and_ids_outside_the_vocabulary_are_named() -> None:
    with pytest.raises(ValueError, match="word 1 is 'hello'"):
        vocab.encode("<bos> hello")
    with pytest.raises(ValueError, match="token id 320 is outside"):
        vocab.decode([320])
