"""Texts beside each other, words that differ marked; the map of a model of many layers."""

from __future__ import annotations

from rich.console import Console
from witcert_demo.chat import ChatQuestion
from witcert_demo.live import heads_map, outcome, overview, panel
from witcert_demo.tally import Asked, Tally
from witcert_demo.tasks import make_samples
from witcert_demo.texts import kept_words, marked


def test_words_that_the_other_text_has_not_are_marked() -> None:
    assert kept_words("a b c d", "a x c d") == [True, False, True, True]
    assert marked("the cat sat down", "the dog sat down now").plain.strip() == "the [dog] sat down [now]"
    assert marked("the cat", "the cat").plain.strip() == "the cat"
    assert marked("the cat", "").plain == "(nothing)"


def test_the_map_has_a_mark_for_every_layer_and_head() -> None:
    tally = Tally("fp8", by_layer_head=[[0.1, 0.5], [0.2, 1.0], [None, 0.3]], tau=0.2)
    _, first, second, _ = heads_map(tally).plain.splitlines()
    assert (first, second) == ("··?", "▒█▒")


def test_texts_changed_and_facts_found_are_counted_apart() -> None:
    free, fact = ChatQuestion("Hello", "Hello"), ChatQuestion("The key is red. Which?", "Which?", "red")
    exact = Tally("16 bit", [Asked(free, "Hi there.", False, None, open=True), Asked(fact, "red", True, None)])
    other = Tally("fp8", [Asked(free, "Hi you.", False, None, open=True), Asked(fact, "red", True, None)])
    assert (other.changed(exact), outcome(other)) == (1, "1 of 1 hidden facts found")
    assert "1 of 2 texts changed, 1 of 1 hidden facts found (16-bit cache: 1 of 1)" in other.sentence(exact)
    console = Console(width=120, record=True)
    console.print(panel(other, exact, 2))
    shown = console.export_text()
    assert "Hi [you.]" in shown
    assert "found: red" in shown


def test_the_small_models_answers_and_heads_stand_in_tables() -> None:
    (sample,) = make_samples("multi_key", 64, 1, 3)
    exact = Tally("16 bit", [Asked(sample, sample.answer, True, None)])
    other = Tally("fp8", [Asked(sample, "nonsense", False, None)], by_layer_head=[[0.125, 1.0]], tau=0.2)
    console = Console(width=120, record=True)
    console.print(panel(other, exact, 1))
    console.print(overview([other], exact))
    shown = console.export_text()
    assert "0 of 1 answers right" in shown
    assert "multi key" in shown
    assert "nonsense" in shown
    assert "0.125" in shown
    assert "0 of 1 answers are right (16-bit cache: 1 of 1)" in other.sentence(exact)
