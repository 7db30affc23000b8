"""Every family of which a tiny checkpoint can be made, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.zoo import family, grouped, hybrid, latent, shaped, windowed
from tests.zoo.family import Family

_KINDS = (grouped, windowed, hybrid, latent, shaped)
FAMILIES: dict[str, Family] = {name: family for kind in _KINDS for name, family in kind.FAMILIES.items()}


def served_by_vllm() -> list[Any]:
    """Parameters of a test: the families that vLLM serves here; most of them, of ten seconds each, for the full run."""
    return [
        pytest.param(name, marks=[] if family.small else [pytest.mark.full_zoo])
        for name, family in FAMILIES.items()
        if "vLLM" in family.engines
    ]


def make_checkpoint(name: str, directory: Path) -> Path:
    """A checkpoint of FAMILIES[name] in `directory`."""
    return family.write(FAMILIES[name], directory)


def prompts() -> list[dict[str, list[int]]]:
    """Token ids: longer than a window, and one in which another begins."""
    shapes = ((60, 7), (90, 7), (33, 9))
    return [{"prompt_token_ids": [1] + [3 + i * step % 300 for i in range(length)]} for length, step in shapes]
