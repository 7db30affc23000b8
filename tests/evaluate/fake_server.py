"""A server that speaks the routes an evaluation needs: `fake_server.py MODEL --host H --port P`, `--broken`, `--place`.

Its answers are "wrong" under a policy that only observes and "key v1 v2" echoed from the prompt otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

model = sys.argv[1]
options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
broken = options.get("--broken", "")
policy_path = os.environ.get("WITCERT_POLICY")
policy = None if policy_path is None else yaml.safe_load(Path(policy_path).read_text())


def answer(prompt: str) -> str:
    """The record of the key that is asked."""
    words = prompt.split()
    key = words[-2]
    place = words.index(key)
    return " ".join(words[place : place + 3])


def summary() -> dict[str, Any]:
    assert policy is not None
    gated = policy["gate"]["kind"] != "observe"
    return {
        "engine": "fake",
        "tier": "deterministic",
        "tau": 0.2,
        "cells_measured": 10,
        "cells_unknown": 0,
        "cells_exact": 0,
        "tv_certified_cells": 9,
        "damaged_cells": 0,
        "deterministic_beside": None,
        "worst": {"meter": 0.5},
        "log_a_max": 1.0,
        "audit": {"cells": 10, "violations": 0, "mismatches": 0, "tv_max": 0.1},
        "gate": {
            "repaired_blocks": 3 * gated,
            "bytes": 300 * gated,
            "within_target": 9,
            "above_target": 0,
            "ranked": 1,
        },
    }


class Handler(BaseHTTPRequestHandler):
    def reply(self, body: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply({"data": [{"id": "served", "root": model}]})
        elif self.path == "/witcert/status" and policy is not None and broken != "unmetered":
            self.reply({"quantizer": policy["quantizer"]["name"], "gate": policy["gate"]["kind"]})
        else:
            self.reply({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        raw = policy is not None and policy["gate"]["kind"] == "observe"
        found = None if policy is None or broken == "silent" else {"witcert": [summary()]}
        place = options.get("--place", "metadata")
        if broken == "refusing":
            self.reply({"message": "no room"}, 500)
        elif self.path == "/v1/chat/completions":
            text = "wrong" if raw else answer(body["messages"][0]["content"])
            self.reply({"choices": [{"message": {"content": text}}], place: found})
        else:
            self.reply({"choices": [{"text": "wrong" if raw else answer(body["prompt"])}], place: found})

    def log_message(self, *_args: object) -> None:
        """Quiet."""


if broken == "dead":
    sys.exit("witcert: this one does not start")
ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
