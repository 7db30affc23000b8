"""Ask an SGLang server the questions of a parity case: `ask_sglang.py CASE.json OUT.json`.

CASE holds model, policy and prompts; OUT gets tokens, summaries and all cell records of every prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from witcert_demo.servers import running_server


def main(case_path: str, out_path: str) -> None:
    case = json.loads(Path(case_path).read_text())
    log = Path(out_path).with_suffix(".log")
    answers: list[dict[str, Any]] = []
    # Without its radix cache, which would find the one token that all prompts begin with.
    options = ["--dtype", "float32", "--disable-radix-cache"]
    with (
        running_server(Path(case["model"]), policy=Path(case["policy"]), log=log, options=options) as server,
        server.client() as client,
    ):
        for prompt in case["prompts"]:
            body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": case["max_tokens"]}}
            reply = client.post("/generate", json=body).raise_for_status().json()
            answers.append({"tokens": reply["output_ids"], "summary": reply["meta_info"]["witcert"]})
    Path(out_path).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
