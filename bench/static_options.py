"""Compile every kernel with all its options on, and in the dtypes the table leaves out: nothing may fail to compile.

``python -m bench.static_options [80|90|100]``, without ``TRITON_INTERPRET``; prints registers and spills.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import triton.language as tl

from bench.static import Case, all_cases, build
from witcert_core.kernels.host import launch
from witcert_core.kernels.repair.triton import repair_kernel

OPTIONS = ("METER", "SOFT_CAP", "WINDOW", "ALIBI", "ROWS", "MIXED", "MULTI", "SINK", "TAIL", "OMEGA", "STEPS")
SINGLE = ("q_ptr", "k_exact_ptr", "v_exact_ptr", "k_bypass_ptr", "out_ptr", "k_new_ptr", "v_new_ptr")
FP32 = dict.fromkeys(SINGLE, "*fp32")


def option_cases(dim: int, arch: int) -> list[Case]:
    """One or two specialisations of each kernel."""
    cases = {case.name: case for case in all_cases(dim, arch)}

    def vary(name: str, title: str, types: dict[str, str] | None = None, **changes: Any) -> Case:
        case = cases[name]
        constants = {key: True if key in OPTIONS else value for key, value in case.constants.items()} | changes
        return replace(case, name=title, constants=constants, types=case.types if types is None else types)

    fp8 = {"k_ptr": "*fp8e5", "v_ptr": "*fp8e5", "vw_ptr": "*u8"}
    half = {"q_ptr": "*fp32", "k_ptr": "*fp16", "v_ptr": "*fp16", "vw_ptr": "*u8"}
    wide = {"exact_ptr": "*fp32", "fake_ptr": "*fp32", "pool_ptr": "*fp32", "witness_ptr": "*u8", "slot_ptr": "*i64"}
    fp32_shape: dict[str, Any] = {"BYPASS": 8, "DIGITS": False, "M": launch.TILE_ROWS}
    side = {"source_ptr": "*bf16", "pool_ptr": "*bf16"}
    return [
        vary("decode+meter+witness", "decode, all options", FLAG=1, BYPASS=8),
        vary("decode+meter+witness", "decode, fp32", FP32, FLAG=2, P_DTYPE=tl.float32, METER=False, **fp32_shape),
        vary("merge", "merge, all options", FLAG=1),
        vary("merge", "merge, unmetered", FLAG=2, METER=False, OMEGA=False),
        vary("certify", "certify, all options", FLAG=1),
        vary("certify", "certify, fp8 pool", fp8, ROWS=False),
        vary("certify", "certify, fp32 over fp16", half, ROWS=False),
        vary("extend", "extend, all options", BYPASS=8),
        vary("extend", "extend, fp32", FP32, P_DTYPE=tl.float32),
        vary("extend tail", "extend tail, all options"),
        vary("extend tail", "extend tail, fp32", FP32, P_DTYPE=tl.float32, METER=False),
        vary("append", "append, bypass and witness", BYPASS=8, BP=8),
        vary("witness", "witness, whole norm in fp32", wide, WHOLE=True),
        Case("repair", repair_kernel, {"SIZE": 1024, "BLOCK": 1024, "TAG": True}, side, warps=4),
    ]


def main() -> None:
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for case in option_cases(64, arch):
        result = build(case, arch)
        print(
            f"{case.name:28} sm_{arch} {result['registers']:4} registers, {result['spills']} spilled bytes", flush=True
        )


if __name__ == "__main__":
    main()
