"""A server started for one quantizer in one mode, asked, and stopped again."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from witcert_core.errors import InputError, UnsupportedError, did_you_mean, listed
from witcert_core.evaluate.askers import Reply, UrlAsker, chatting, deciding
from witcert_core.evaluate.servers import free_port, serving
from witcert_core.evaluate.settings import EXACT, Mode, QuantizerSpec, build_policy
from witcert_core.evaluate.tasks import EvalSample
from witcert_core.serving.doctor import installed_engines

COMMANDS: dict[str, Sequence[str]] = {
    "sglang": (str(Path(sys.executable).with_name("sglang")), "serve", "--model-path"),
    "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
}
"""Arguments of this interpreter up to the model's path, by engine."""
START_TIMEOUT_S = 1800.0
"""Large checkpoints take long to load."""


class ServedAsker:
    """`exact` runs without a policy, so without the meter: the engine as it is."""

    def __init__(
        self,
        engine: str,
        model: str,
        base: Mapping[str, Any],
        spec: QuantizerSpec,
        mode: Mode,
        *,
        dtype: str,
        options: Sequence[str],
        logs: Path,
        parallel: int,
        chat: bool = False,
    ) -> None:
        if engine not in COMMANDS:
            known = ("offline", *COMMANDS)
            raise InputError(f"engine is {engine!r}{did_you_mean(engine, known)}; allowed are {listed(known)}")
        if find_spec(engine) is None:
            raise UnsupportedError(f"{engine} is not installed in {sys.prefix}; run witcert from its environment")
        if mode != "exact" and engine not in installed_engines():
            raise UnsupportedError(f"witcert-{engine} is not installed in {sys.prefix}; without it nothing is metered")
        self.engine = engine
        self.mode: Mode = mode
        self.quantizer = EXACT if mode == "exact" else spec.label
        self.parallel = parallel
        self._model = model
        self._chat = chat
        self._options = [*([] if dtype == "auto" else ["--dtype", dtype]), *options]
        self._policy = None if mode == "exact" else build_policy(base, spec, mode)
        options_and_policy = {"server options": self._options, **chatting(chat), **deciding(self._policy)}
        self.settings: Mapping[str, Any] = {"engine": engine, **options_and_policy}
        self._name = f"{engine}-{self.quantizer}-{mode}".replace("/", "_")
        self._logs = logs
        self._stack = ExitStack()
        self._url: UrlAsker | None = None

    def open(self) -> None:
        """Raises ServerError where the server does not start, with the line that says why."""
        port = free_port()
        command = [sys.executable, *COMMANDS[self.engine], self._model, "--host", "127.0.0.1", "--port", str(port)]
        env = {key: value for key, value in os.environ.items() if key != "WITCERT_POLICY"}
        if self._policy is not None:
            path = self._logs / f"{self._name}.yaml"
            path.write_text(yaml.safe_dump(self._policy.model_dump(mode="json")), encoding="utf-8")
            env["WITCERT_POLICY"] = str(path)
        log = self._logs / f"{self._name}.log"
        run = serving([*command, *self._options], port, env=env, log=log, timeout_s=START_TIMEOUT_S)
        with ExitStack() as stack:
            server = stack.enter_context(run)
            self._url = UrlAsker(server.url, self.parallel, self._chat)
            told = None if self._url.status is None else (self._url.status["quantizer"], self._url.status["gate"])
            wanted = None if self._policy is None else (self._policy.quantizer.name, self._policy.gate.kind)
            if told != wanted:
                raise UnsupportedError(f"{self._name}: the server says it runs {told}, not {wanted}; see {log}")
            self._stack = stack.pop_all()

    def ask(self, sample: EvalSample, request_id: str) -> Reply:
        if self._url is None:
            raise UnsupportedError("an asker that was not opened cannot be asked")
        return self._url.ask(sample, request_id)

    def close(self) -> None:
        self._stack.close()
