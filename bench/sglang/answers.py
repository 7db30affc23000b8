"""An SGLang server's answers to questions, under one policy."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.run import ask
from witcert_demo.servers import running_server
from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample


def ask_all(
    model: Path, work: Path, dtype: str, name: str, policy: dict[str, Any], asked: Sequence[Sample]
) -> list[Asked]:
    """Four at a time, each prompt computed alone: no prefix is shared."""
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **policy}))
    options = ["--dtype", dtype, "--disable-radix-cache"]
    log = work / f"{name}.log"
    with running_server(model, policy=path, log=log, options=options) as server, ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda sample: ask(server, sample), asked))
