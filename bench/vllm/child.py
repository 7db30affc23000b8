"""One engine in a process of its own: `child.py CASE.json OUT.json`; see `bench.py` for what a case holds."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import types
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


def main(case_path: str, out_path: str) -> None:
    case = json.loads(Path(case_path).read_text())
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    if case["policy"]:
        os.environ["WITCERT_POLICY"] = case["policy"]
    if case["triton"]:
        let_triton_run_here()
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if case["triton"]:
        register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.TRITON_ATTN.value)
    fixed = {"max_model_len": 1024, "gpu_memory_utilization": 0.3, "enforce_eager": True, "block_size": 32}
    llm = LLM(model=case["model"], **{**fixed, **case["options"]})
    cache = llm.llm_engine.vllm_config.cache_config
    found: dict[str, Any] = {"tokens": cache.num_gpu_blocks * cache.block_size, "answers": []}
    if case["prompts"]:
        params = SamplingParams(temperature=0, max_tokens=16)
        for output in llm.generate(case["prompts"], params, use_tqdm=False):
            carried = (output.kv_transfer_params or {}).get("witcert", [None])
            found["answers"].append({"ids": list(output.outputs[0].token_ids), "summary": carried[0]})
    if case["rounds"]:
        found["speeds"] = [speed(llm, seed) for seed in range(case["rounds"] + 1)][1:]  # the first one warms up
    Path(out_path).write_text(json.dumps(found))


def speed(llm: Any, seed: int, clients: int = 4, prompt: int = 256, new: int = 64) -> float:
    """Generated tokens a second of `clients` fresh prompts at once."""
    from vllm import SamplingParams
    from witcert_demo.vocabulary import FIRST_FILLER, NUM_PER_CLASS

    rng = random.Random(seed)
    ids = [[FIRST_FILLER + rng.randrange(NUM_PER_CLASS) for _ in range(prompt)] for _ in range(clients)]
    begun = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
