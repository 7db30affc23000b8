"""Two tensor-parallel ranks report what one does: the same tokens, the same heads, the same bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Metered, samples_of_each_task, write_policy
from witcert_demo.servers import running_server

pytestmark = pytest.mark.sglang


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank is bound to a core of its own")
def test_two_ranks_equal_one(twin: Path, tmp_path: Path) -> None:
    policy = write_policy(
        tmp_path / "policy.yaml",
        quantizer={"name": "int4_token_group"},
        meter={"audit_every": 1},
        gate={"kind": "combined", "target": "tv"},
    )
    prompts = [sample.prompt for sample in samples_of_each_task(1, num_tokens=192)]
    replies = {}
    for ranks in (1, 2):
        options = ["--dtype", "float32", "--disable-radix-cache", "--tp-size", str(ranks)]
        bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(ranks))}
        log = tmp_path / f"log{ranks}"
        with running_server(twin, policy=policy, log=log, options=options, environment=bind) as server:
            replies[ranks] = [Metered(server, tmp_path / "none").generate(prompt) for prompt in prompts]
    for one, two in zip(replies[1], replies[2], strict=True):
        assert two["output_ids"] == one["output_ids"]
        ours, theirs = one["meta_info"]["witcert"], two["meta_info"]["witcert"]
        for key in ("rows_metered", "cells_measured", "cells_unknown", "tv_certified_cells"):
            assert theirs[key] == ours[key], key
        assert theirs["audit"]["violations"] == ours["audit"]["violations"] == 0
        assert theirs["gate"]["repaired_blocks"] == ours["gate"]["repaired_blocks"] > 0
        for row_one, row_two in zip(ours["worst_by_layer_head"], theirs["worst_by_layer_head"], strict=True):
            # Ranks add up in another order: a key next to a boundary of its 4 bits may be stored as its neighbour.
            assert row_two == pytest.approx(row_one, abs=2e-3)
