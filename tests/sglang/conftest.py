"""Real SGLang servers on the CPU, each started once for the tests that share it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import recorded
import yaml
from witcert_demo.run import CHECKPOINT, ask, build_twin
from witcert_demo.servers import Server, running_server
from witcert_demo.tally import Asked
from witcert_demo.tasks import Sample, make_samples

KEY, ADMIN_KEY = "a client's key", "the administrator's"
TASKS = ("single_needle", "multi_key", "variable_tracking")
SAME_DITHER = {"PYTHONPATH": os.pathsep.join(filter(None, (str(recorded.PINNED), os.environ.get("PYTHONPATH"))))}


@dataclass
class Metered:
    """A metered server, the policy it runs and where its JSON lines go."""

    server: Server
    jsonl: Path

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.jsonl.read_text().splitlines()]

    def generate(self, prompt: str, **sampling: Any) -> dict[str, Any]:
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **sampling}}
        with self.server.client() as client:
            answer: dict[str, Any] = client.post("/generate", json=body).raise_for_status().json()
        return answer


def check_recorded(case: str, metered: Metered) -> None:
    """The first requests of a server report what they reported when they were recorded; see `recorded.py`.

    A prompt, which may be cut into chunks; the same and more behind it; three at once. As ids: SGLang hands the three
    to its scheduler in one message then, and so always to the same pass.
    """
    first, *others = (list(sample.prompt_ids) for sample in samples_of_each_task(1, num_tokens=160, seed=19))
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answers = []
    for number, asked in enumerate(([first], [first + others[0][:20]], [first, *others])):
        names = [f"recorded-{number}-{i}" for i in range(len(asked))]
        body = {"input_ids": asked, "rid": names, "sampling_params": sampling}
        with metered.server.client() as client:
            answers += client.post("/generate", json=body).raise_for_status().json()
    records = metered.records()
    found = [recorded.run_of(a["output_ids"], a["meta_info"]["witcert"], records) for a in answers]
    recorded.check("sglang", case, found)


def write_policy(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({"version": 1, **sections}))
    return path


def ask_many(server: Server, samples: list[Sample], workers: int = 4) -> list[Asked]:
    """Ask concurrently, so that batches, mixed chunks and retractions happen."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda sample: ask(server, sample), samples))


def samples_of_each_task(count: int, num_tokens: int = 512, seed: int = 3) -> list[Sample]:
    return [s for task in TASKS for s in make_samples(task, num_tokens, count, seed)]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def fp8_twin(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    """The twin with fp8_e4m3_cast, every row metered and audited, small chunks mixed with decode rows.

    It asks for a key, has another one for its administrator, and joins the messages of a chat.
    """
    work = tmp_path_factory.mktemp("fp8")
    jsonl = work / "records.jsonl"
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "fp8_e4m3_cast"},
        meter={"stride": 1, "audit_every": 1},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    template = work / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    options = ["--dtype", "float32", "--chunked-prefill-size", "128", "--enable-mixed-chunk"]
    options += ["--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--chat-template", str(template)]
    with running_server(twin, policy=policy, log=work / "log", options=options) as server:
        yield Metered(replace(server, key=KEY), jsonl)


@pytest.fixture(scope="module")
def int8_original(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    """The original model with int8_dither in pages of 16, prompts reading what is stored, every third row metered."""
    work = tmp_path_factory.mktemp("int8")
    jsonl = work / "records.jsonl"
    policy = write_policy(
        work / "policy.yaml",
        quantizer={"name": "int8_dither"},
        prefill_reads="stored",
        meter={"stride": 3, "audit_every": 2, "max_rows": 2},
        report={"jsonl": str(jsonl), "cells": "all"},
    )
    options = ["--dtype", "float32", "--page-size", "16"]
    log = work / "log"
    with running_server(checkpoint, policy=policy, log=log, options=options, environment=SAME_DITHER) as server:
        yield Metered(server, jsonl)
