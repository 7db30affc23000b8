"""The configuration class that checkpoints of Nemotron NAS bring along: Transformers has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig


class Part(dict[str, Any]):
    """A mapping whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return Part(self[name]) if isinstance(self[name], dict) else self[name]


class DeciLMConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "nemotron-nas"

    def __init__(self, block_configs: Sequence[dict[str, Any]] = (), **fields: Any) -> None:
        self.block_configs = [Part(block) for block in block_configs]
        super().__init__(**fields)
