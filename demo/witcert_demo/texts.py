"""Answers of a quantized cache beside those of the 16-bit one, the words that differ marked."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter

from rich import box
from rich.table import Table
from rich.text import Text

from witcert_demo.chat import ChatQuestion
from witcert_demo.tally import Asked, Tally


def kept_words(exact: str, answer: str) -> list[bool]:
    """Of each word of `answer`, whether it stands in `exact` too, in the same order."""
    before, after = exact.split(), answer.split()
    kept = [False] * len(after)
    for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        kept[block.b : block.b + block.size] = [True] * block.size
    return kept


def marked(exact: str, answer: str) -> Text:
    """`answer`; runs of words that `exact` has not are bold red, and in brackets for where there are no colours."""
    text = Text()
    for kept, run in groupby(zip(kept_words(exact, answer), answer.split(), strict=True), key=itemgetter(0)):
        words = " ".join(word for _, word in run)
        text.append(words if kept else f"[{words}]", style="" if kept else "bold red")
        text.append(" ")
    return text if text else Text("(nothing)", style="bold red")


def texts_table(tally: Tally, exact: Tally) -> Table:
    """Question, answer from the 16-bit cache, answer from this one."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=True)
    table.add_column("asked", ratio=3)
    table.add_column("16-bit cache", ratio=4)
    table.add_column(f"{tally.name} [other words]", ratio=4)
    for item, reference in zip(tally.asked, exact.asked, strict=False):
        assert isinstance(item.sample, ChatQuestion)
        answer = marked(reference.answer, item.answer)
        table.add_row(
            Text(item.sample.asked, style="dim"), _answer(reference, Text(reference.answer)), _answer(item, answer)
        )
    return table


def _answer(item: Asked, text: Text) -> Text:
    """With a verdict where one answer is right."""
    if item.open:
        return text
    return Text.assemble(("found: ", "green") if item.right else ("lost: ", "bold red"), text)
