"""The JSON schemas (draft 2020-12) of what is reported."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Literal


def load_schema(name: Literal["request", "cell"]) -> dict[str, Any]:
    """The schema of a request summary or of a cell record."""
    schema: dict[str, Any] = json.loads(files(__package__).joinpath(f"{name}.schema.json").read_text("utf-8"))
    return schema
