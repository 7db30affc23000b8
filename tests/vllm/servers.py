"""Start and stop a real `vllm serve` on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from witcert_demo.servers import Server, free_port, stop, wait_until_healthy

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--gpu-memory-utilization", "0.3")
SMALL_CACHE = ("--kv-cache-memory-bytes", "32M")


def environment(policy: Path | None) -> dict[str, str]:
    """The environment of a CPU server; WITCERT_POLICY is set only for a metered one."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.pop("WITCERT_POLICY", None)
    if policy is not None:
        env["WITCERT_POLICY"] = str(policy)
    return env


def command(model: Path, options: Sequence[str]) -> list[str]:
    """The command line of a server of `model`; `options` come last and so win."""
    vllm = Path(sys.executable).with_name("vllm")
    return [str(vllm), "serve", str(model), "--host", "127.0.0.1", *OPTIONS, *SMALL_CACHE, *options]


@contextmanager
def running_server(
    model: Path, *, policy: Path | None, log: Path, options: Sequence[str] = (), **variables: str
) -> Iterator[Server]:
    """A healthy server for the length of the block; every process it started is gone afterwards."""
    port = free_port()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command(model, ["--port", str(port), *options]),
            env={**environment(policy), **variables},
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_healthy(server, lambda _seconds: None)
        yield server
    finally:
        stop(process)
