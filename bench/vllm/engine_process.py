"""One vLLM engine in a process of its own: `engine_process.py CASE.json`; `engines.py` starts it and talks to it."""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def let_triton_run_here() -> None:
    """vLLM reads its per-token-head caches with Triton only; on a CPU that is Triton's interpreter and runner V2."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)


def start(case: dict[str, Any]) -> Any:
    """The engine (vLLM's `LLM`)."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ.pop("WITCERT_POLICY", None)
    if case["policy"]:
        os.environ["WITCERT_POLICY"] = case["policy"]
    if case["triton"]:
        let_triton_run_here()
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if case["triton"]:
        register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.TRITON_ATTN.value)
    fixed = {"max_model_len": 1024, "gpu_memory_utilization": 0.3, "enforce_eager": True, "block_size": 32}
    return LLM(model=case["model"], **{**fixed, **case["options"]})


def tokens(llm: Any) -> int:
    """Tokens the cache holds, by vLLM's own account."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def answers(llm: Any, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """Greedy answers, all prompts at once, with their summaries."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        carried = (output.kv_transfer_params or {}).get("witcert", [None])
        (choice,) = output.outputs
        found.append({"ids": list(choice.token_ids), "text": choice.text, "summary": carried[0]})
    return found


def speed(llm: Any, prompts: list[list[int]], new: int) -> float:
    """Generated tokens a second, all prompts at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begun)


CALLS: dict[str, Callable[..., Any]] = {"tokens": tokens, "answers": answers, "speed": speed}


def main(case_path: str) -> None:
    """Answer one line of JSON with one, until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no reply
    llm = start(json.loads(Path(case_path).read_text()))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        reply = CALLS[name](llm, *arguments)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
