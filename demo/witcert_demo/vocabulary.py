"""The closed vocabulary of the needle tasks and its word-level tokenizer.

A text is symbols separated by blanks; every symbol is one token, so a prompt has exactly as many tokens as
words. The tokenizer adds nothing by itself: a prompt spells its ``<bos>``, and decoding undoes encoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

PAD, BOS, END, ASK, COLON, UNKNOWN = 0, 1, 2, 3, 5, 6
FIRST_VALUE, FIRST_KEY, FIRST_FILLER = 10, 110, 210
NUM_PER_CLASS = 100
VOCAB_SIZE = 320
MODEL_MAX_LENGTH = 2048

_MARKS = {PAD: "<pad>", BOS: "<bos>", END: "<end>", ASK: "ask", COLON: ":", UNKNOWN: "<unk>"}


def _symbol(token_id: int) -> str:
    """Spelling of one id; ids without a meaning are spelled ``<rN>`` so that the table has no hole."""
    if token_id in _MARKS:
        return _MARKS[token_id]
    for first, pattern in ((FIRST_VALUE, "{:02d}"), (FIRST_KEY, "key{:02d}"), (FIRST_FILLER, "w{:02d}")):
        if first <= token_id < first + NUM_PER_CLASS:
            return pattern.format(token_id - first)
    return f"<r{token_id}>"


SYMBOLS: tuple[str, ...] = tuple(_symbol(token_id) for token_id in range(VOCAB_SIZE))
_IDS = {symbol: token_id for token_id, symbol in enumerate(SYMBOLS)}


def encode(text: str) -> list[int]:
    """Token ids of ``text``. Raises ``ValueError`` at the first word outside the vocabulary."""
    ids: list[int] = []
    for position, word in enumerate(text.split()):
        if word not in _IDS:
            raise ValueError(
                f"word {position} is {word!r}, which is no symbol of this vocabulary; allowed are "
                "key00..key99, 00..99, w00..w99 and the marks " + " ".join(_MARKS.values())
            )
        ids.append(_IDS[word])
    return ids


def decode(ids: Iterable[int]) -> str:
    """Text of ``ids``, one blank between symbols. Raises ``ValueError`` for an id outside the vocabulary."""
    words: list[str] = []
    for token_id in ids:
        if not 0 <= token_id < VOCAB_SIZE:
            raise ValueError(f"token id {token_id} is outside the vocabulary 0..{VOCAB_SIZE - 1}")
        words.append(SYMBOLS[token_id])
    return " ".join(words)


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` in the format of Hugging Face ``tokenizers``."""
    special = [
        {
            "id": token_id,
            "content": SYMBOLS[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id in (PAD, BOS, END, UNKNOWN)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": _IDS, "unk_token": SYMBOLS[UNKNOWN]},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SYMBOLS[BOS],
        "eos_token": SYMBOLS[END],
        "pad_token": SYMBOLS[PAD],
        "unk_token": SYMBOLS[UNKNOWN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
