"""Question answering over short documents about places that do not exist, one of which holds the answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from witcert_core.evaluate.ruler.draft import Draft
from witcert_core.evaluate.ruler.prose import words

_MATERIALS = ("granite", "oak", "brick", "limestone", "copper", "glass", "cedar", "slate", "iron", "marble")
_TRADES = ("salt", "wool", "paper", "amber", "tin", "barley", "ink", "honey", "leather", "silk")
_KINDS = ("bridge", "library", "lighthouse", "theatre", "granary", "observatory", "school", "chapel")


@dataclass(frozen=True)
class _Town:
    """What a document says of a place."""

    name: str
    river: str
    kind: str
    material: str
    trade: str
    year: int

    def document(self) -> str:
        return (
            f"{self.name} is a town on the river {self.river}. It lived on the trade in {self.trade} for centuries. "
            f"Its best known building is the {self.kind}, which was built of {self.material} in the year {self.year} "
            f"and stands where the road from the hills meets the water."
        )

    def question(self, rng: random.Random) -> tuple[str, str]:
        """A question only this document answers, and its answer."""
        return rng.choice(
            [
                (f"On which river does the town of {self.name} lie?", self.river),
                (f"Of what was the {self.kind} of {self.name} built?", self.material),
                (f"In which year was the {self.kind} of {self.name} built?", str(self.year)),
                (f"On the trade in what did the town of {self.name} live?", self.trade),
                (f"Which river passes the town whose {self.kind} was built in {self.year}?", self.river),
            ]
        )


def question_answering(rng: random.Random, size: int) -> Draft:
    """`size` documents; the question is about one of them."""
    names = [word.capitalize() for word in words(rng, 2 * size, syllables=3)]
    years = rng.sample(range(1200, 1200 + max(700, size)), size)  # all different: a year names a town
    towns = [
        _Town(town, river, rng.choice(_KINDS), rng.choice(_MATERIALS), rng.choice(_TRADES), year)
        for town, river, year in zip(names[:size], names[size:], years, strict=True)
    ]
    question, answer = rng.choice(towns).question(rng)
    documents = "\n\n".join(f"Document {i}: {town.document()}" for i, town in enumerate(towns, 1))
    prompt = (
        "Answer the question from the documents below with one word or number.\n\n"
        f"{documents}\n\nQuestion: {question}\nAnswer:"
    )
    return Draft(prompt, (answer,), f" {answer}.", 24, scoring="any")
