"""Start and stop a real SGLang server on the CPU; used by the demonstration, the tests and the benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from witcert_core.evaluate.servers import (
    Server,
    ServerError,
    free_port,
    group_alive,
    last_words,
    serving,
    stop,
    wait_until_healthy,
)

__all__ = [
    "Server",
    "ServerError",
    "free_port",
    "group_alive",
    "last_words",
    "running_server",
    "server_command",
    "server_environment",
    "stop",
    "wait_until_healthy",
]


def server_command(model: Path, port: int, options: Sequence[str]) -> list[str]:
    """The command line of a CPU server of `model`; `options` come last and so win."""
    fixed = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
    ]
    small = [
        "--max-total-tokens",
        "8192",
        "--max-running-requests",
        "16",
        "--enable-metrics",
        "--skip-server-warmup",
    ]
    return [
        str(Path(sys.executable).with_name("sglang")),
        "serve",
        "--model-path",
        str(model),
        *fixed,
        *small,
        *options,
    ]


def server_environment(policy: Path | None) -> dict[str, str]:
    """The environment of a CPU server; WITCERT_POLICY is set only for a metered one."""
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    env.setdefault("OMP_NUM_THREADS", "1")
    # Dumps of a GPU's state, for which SGLang would wait 5 seconds whenever it stops and a minute when it fails.
    env |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    env.pop("WITCERT_POLICY", None)
    if policy is not None:
        env["WITCERT_POLICY"] = str(policy)
    return env


@contextmanager
def running_server(
    model: Path,
    *,
    policy: Path | None,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    waiting: Callable[[float], None] = lambda _seconds: None,
) -> Iterator[Server]:
    """A healthy server for the length of the block; every process it started is gone afterwards.

    environment: variables on top of `server_environment`. waiting: called with the seconds waited so far while the
    server starts. Raises ServerError if it does not start.
    """
    port = free_port()
    command = server_command(model, port, options)
    env = {**server_environment(policy), **(environment or {})}
    with serving(command, port, env=env, log=log, waiting=waiting) as server:
        yield server
