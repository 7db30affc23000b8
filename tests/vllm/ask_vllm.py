"""Ask a vLLM engine in a process of its own: `ask_vllm.py CASE.json OUT.json`.

CASE: model, policy, prompts, max_tokens, engine options, and `v2` for model runner V2, which vLLM only runs on a CPU
when Triton claims a backend there; its kernels then run in Triton's interpreter. With `triton` attention is its too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.vllm.engine_process import let_triton_run_here


def runner_name(worker: Any) -> str:
    return f"{type(worker.model_runner).__module__} {worker.model_config.enforce_eager}"


def summer_of(_worker: Any) -> str:
    """Who sums over the rows of the cache that serves in a worker."""
    from witcert_vllm import process

    from witcert_core.serving.storage.acts import Observing
    from witcert_core.serving.storage.packed import PackedStorage

    cache = process.runtime().groups[0].cache
    if isinstance(cache.storage, PackedStorage) and cache.storage.kernels is not None:
        return type(cache.storage.kernels).__name__
    return type(cache.acts.summer if isinstance(cache.acts, Observing) else cache.acts).__name__


def main(case_path: str, out_path: str) -> None:
    case = json.loads(Path(case_path).read_text())
    if case["v2"]:
        let_triton_run_here()
    os.environ.update({"WITCERT_POLICY": case["policy"], "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `runner_name` below
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if case["triton"]:
        register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.TRITON_ATTN.value)
    from readback import compared_outputs

    fixed = {"dtype": "float32", "max_model_len": 1024, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    llm = LLM(model=case["model"], **{**fixed, "kv_cache_memory_bytes": 16 << 20, **case["options"]})
    answers = []
    with compared_outputs() as apart:
        for prompt in case["prompts"]:
            params = SamplingParams(temperature=0, max_tokens=case["max_tokens"])
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            (summary,) = output.kv_transfer_params["witcert"]
            answers.append({"tokens": list(output.outputs[0].token_ids), "summary": summary})
    (runner, *_) = llm.collective_rpc(runner_name)
    (summer, *_) = llm.collective_rpc(summer_of)
    status = llm.collective_rpc("witcert_status")[0]
    found = {"answers": answers, "runner": runner, "status": status, "apart": apart, "summer": summer}
    Path(out_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
