"""What the demonstration asks a chat model: open questions, and questions for facts hidden in a text before them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NEW_TOKENS = 32
_TOWN = (
    "The bakery on the corner opens at six and sells its bread until noon. In the afternoon the square is quiet, and "
    "cats sleep on the warm stones. A tram climbs the hill every ten minutes, full of people who look out of the "
    "windows. "
)


@dataclass(frozen=True)
class ChatQuestion:
    """One message of a user. asked: what of it is shown; expected: what a right answer holds, None where many are."""

    message: str
    asked: str
    expected: str | None = None


def _needle(fact: str, asked: str, expected: str) -> ChatQuestion:
    return ChatQuestion(f"{_TOWN * 2}{fact} {_TOWN * 2}\n\n{asked}", f"... {fact} ... {asked}", expected)


def _free(message: str) -> ChatQuestion:
    return ChatQuestion(message, message)


QUESTIONS = (
    _free("My dog is called Biscuit and I live in Lisbon. Write one sentence about me and my dog."),
    _needle("The password of the library is 'violet'.", "What is the password of the library?", "violet"),
    _free("What is the capital of France, and what is it known for?"),
    _needle(
        "Maria keeps her key under the blue pot.", "According to the text, where does Maria keep her key?", "blue pot"
    ),
    _free("Explain in two sentences why the sky is blue."),
    _needle(
        "The train to Porto leaves at 9:45.", "When does the train to Porto leave, according to the text above?", "9:45"
    ),
)
"""Chosen among others as ones that the 16-bit cache answers sensibly; the model is a small one."""
