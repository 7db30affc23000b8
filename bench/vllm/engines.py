"""vLLM engines for a bench, each in a process of its own that sleeps while it is asked nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from witcert_demo.run import MAX_NEW_TOKENS
from witcert_demo.score import exact_match
from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample


@dataclass
class Engine:
    """A running engine; each call is a line of JSON to its process and a line back."""

    process: subprocess.Popen[str]
    log: Path

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function of `engine_process.py` gives."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)
        reply = self.process.stdout.readline()
        if not reply:
            raise RuntimeError(
                f"vLLM ended instead of answering; the end of {self.log}:\n{self.log.read_text()[-2000:]}"
            )
        return json.loads(reply)

    def ask(self, asked: Sequence[Sample]) -> list[Asked]:
        """All questions at once."""
        found = self.call("answers", [sample.prompt for sample in asked], MAX_NEW_TOKENS)
        return [
            Asked(sample, answer["text"].strip(), exact_match(sample, answer["ids"]), answer["summary"])
            for sample, answer in zip(asked, found, strict=True)
        ]


@contextmanager
def running_engine(
    model: Path, work: Path, name: str, policy: dict[str, Any] | None, *, triton: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine for the length of the block; its case, policy and log are `work`/`name`.*.

    triton: attention by vLLM's Triton backend in the interpreter. options: vLLM's `EngineArgs`.
    """
    written = ""
    if policy is not None:
        path = work / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"version": 1, **policy}))
        written = str(path)
    case, log = work / f"{name}.json", work / f"{name}.log"
    case.write_text(json.dumps({"model": str(model), "policy": written, "triton": triton, "options": options}))
    command = [sys.executable, "-m", "bench.vllm.engine_process", str(case)]
    with (
        log.open("w") as sink,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True) as process,
    ):
        try:
            yield Engine(process, log)
        finally:
            process.kill()
