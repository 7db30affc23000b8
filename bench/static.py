"""Compile every kernel for sm_80, sm_90 and sm_100 without a GPU and write ``bench/static.md``.

Run without ``TRITON_INTERPRET``: ``python -m bench.static [--check]``. Registers and spills are what ptxas
says of the generated PTX. ``--check`` compiles the decode and extend kernels at D = 128 alone, writes nothing and
fails if one spills; without it the whole table is held to that, at D = 64 too. A second table counts the instructions
of the decode kernels' loops (``static_loop.py``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import witcert_core.kernels.host.launch as launch
import witcert_core.kernels.host.slack as slack
from bench.static_loop import Loop, loop_table
from witcert_core.kernels.append.triton import append_kernel
from witcert_core.kernels.certify.triton import certify_split
from witcert_core.kernels.decode.launch import tile_shape
from witcert_core.kernels.decode.triton import decode_split
from witcert_core.kernels.device.merge import merge_splits
from witcert_core.kernels.extend.launch import TILE_PAIRS
from witcert_core.kernels.extend.triton import extend_attention, tail_split
from witcert_core.kernels.witness.triton import write_witness_kernel
from witcert_core.quantizers.layout import KVLayout

TARGETS = (80, 90, 100)
HEAD_DIMS = (64, 128)
POINTERS = {
    "q_ptr": "*bf16",
    "k_exact_ptr": "*bf16",
    "v_exact_ptr": "*bf16",
    "k_ptr": "*i8",
    "v_ptr": "*i8",
    "ks_ptr": "*i32",
    "vs_ptr": "*fp16",
    "kw_ptr": "*u8",
    "keep_ptr": "*u8",
    "k_bypass_ptr": "*bf16",
    "out_ptr": "*bf16",
    "witness_ptr": "*u8",
    "counter_ptr": "*i64",
}
INTS = ("_ptr", "*i32")
FLOATS = ("delta_ptr", "alibi_ptr", "part_o_ptr", "part_m_ptr", "lse_ptr", "acc_ptr", "sink_ptr", "omega_ptr")
SCALARS = {
    "seed": "i64",
    "sm_scale": "fp32",
    "cap": "fp32",
    "v_scale": "fp32",
    "new_scale": "fp32",
    "v_unscale": "fp32",
    "engine_constant": "fp32",
}


@dataclass(frozen=True)
class Case:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    warps: int = launch.NUM_WARPS
    stages: int = 1
    must_not_spill: bool = False
    bytes_moved: int | None = None
    floor: int | None = None


def signature(case: Case) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Argument types, and 16-byte alignment for pointers and strides (as PyTorch's allocator gives)."""
    types: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            types[name] = "constexpr"
            continue
        if name in case.types:
            types[name] = case.types[name]
        elif name in POINTERS:
            types[name] = POINTERS[name]
        elif name in FLOATS:
            types[name] = "*fp32"
        elif name.endswith("_ptr"):
            types[name] = "*i32"
        else:
            types[name] = SCALARS.get(name, "i32")
        wide = name.startswith("stride_") and not re.match(r"stride_(ks|vs|kw)_", name)
        if types[name].startswith("*") or wide:
            aligned[(i,)] = [["tt.divisibility", 16]]
    return types, aligned


def build(case: Case, arch: int) -> dict[str, Any]:
    """Compile and ask ptxas: registers, spilled bytes, shared memory; and the machine code."""
    types, aligned = signature(case)
    source = ASTSource(case.kernel, types, case.constants, aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptxas = get_ptxas(arch).path
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "k.ptx"
        ptx.write_text(compiled.asm["ptx"])
        suffix = "a" if arch >= 90 else ""
        command = [
            ptxas,
            "-v",
            "--regAllocOptLevel=2",
            f"--gpu-name=sm_{arch}{suffix}",
            str(ptx),
            "-o",
            f"{folder}/k.o",
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or spill is None:
        raise RuntimeError(f"ptxas said nothing of registers or spills for {case.name}: {log}")
    return {
        "registers": int(used.group(1)),
        "spills": int(spill.group(1)) + int(spill.group(2)),
        "shared": int(compiled.metadata.shared),
        "cubin": compiled.asm["cubin"],
    }


def decode_cases(dim: int, old: bool) -> list[Case]:
    """INT8 decode of 8 KV heads with G = 4 (or 8), pages of 16, metered or not, as it is launched on a GPU that is
    ``old`` (before Hopper) or not; where pages may be repaired, the bytes are those of a request without one."""
    layout, stored, spared = KVLayout(dim), KVLayout(dim, stored_witness=True), KVLayout(dim, bypass_pairs=4)
    common: dict[str, Any] = {
        "G": 4,
        "D": dim,
        "DV": dim,
        "GV": launch.group_count(dim),
        "PAGE": 16,
        "SPLIT": slack.SPLIT_TOKENS,
        "SOFT_CAP": False,
        "WINDOW": False,
        "ALIBI": False,
        "ROWS": False,
        "FLAG": 0,
        "MIXED": False,
        "MULTI": False,
        "BYPASS": 0,
        "BP": 16,
        "EXACT_DOT_ERROR": slack.dot_error(dim),
        "BYPASS_DOT_ERROR": slack.dot_error(1),
        "P_DTYPE": tl.bfloat16,
        "DOT_ERROR": slack.int8_dot_error(-(-dim // 32)),
    }
    cases = []
    plain, metered = {"METER": False, "WITNESS": False}, {"METER": True, "WITNESS": False}
    for name, changes, size in (
        ("decode", plain, layout.bytes_per_token_head),
        ("decode+meter", metered, layout.bytes_per_token_head),
        ("decode+meter+witness", {"METER": True, "WITNESS": True}, stored.bytes_per_token_head),
        ("decode+meter+bypass", metered | {"BYPASS": 8}, spared.bytes_per_token_head),
        ("decode+meter+repaired", metered | {"MIXED": True}, layout.bytes_per_token_head),
        ("decode, G = 8", plain | {"G": 8}, layout.bytes_per_token_head),
        ("decode+meter, G = 8", metered | {"G": 8}, layout.bytes_per_token_head),
        ("decode+meter+repaired, G = 8", metered | {"MIXED": True, "G": 8}, layout.bytes_per_token_head),
    ):
        constants = common | changes
        shape = tile_shape(torch.bfloat16, constants["G"], constants["MIXED"], old)
        constants |= {"M": shape.pairs, "N": shape.tokens, "DIGITS": shape.digits}
        # Beside the codes: 4 bytes of row id a token, shared by the heads that read it, 4 of page index a
        # page.
        cases.append(
            Case(
                name,
                decode_split,
                constants,
                {"kw_ptr": "*i32" if dim % 128 == 0 else "*u8"},
                warps=shape.warps,
                stages=shape.stages,
                must_not_spill=True,
                bytes_moved=size + 4,
                floor=layout.bytes_per_token_head,
            )
        )
    merge = {
        "DV": dim,
        "DV_PAD": dim,
        "PAGE": 16,
        "SPLIT": slack.SPLIT_TOKENS,
        "BLOCK": 16,
        "METER": True,
        "SINK": False,
        "WINDOW": False,
        "ROWS": False,
        "FLAG": 0,
        "STORE_OUT": True,
        "OMEGA": False,
        "TAIL": False,
    }
    cases.append(Case("merge", merge_splits, merge, warps=4))
    return cases


def other_cases(dim: int) -> list[Case]:
    """Writers, certificate and extend, bf16 in and out."""
    layout = KVLayout(dim)
    append: dict[str, Any] = {"HKV": 8, "D": dim, "DV": dim, "PAGE": 16, "N": 32, "WITNESS": True, "BYPASS": 0, "BP": 1}
    bf16_sides = {
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "k_ptr": "*i8",
        "v_ptr": "*i8",
        "slot_ptr": "*i64",
        "bypass_ptr": "*bf16",
    }
    pool = {"k_ptr": "*bf16", "v_ptr": "*bf16", "k_new_ptr": "*bf16", "v_new_ptr": "*bf16", "vw_ptr": "*u8"}
    chunk = {"k_new_ptr": "*bf16", "v_new_ptr": "*bf16"}
    writer = {"exact_ptr": "*bf16", "fake_ptr": "*fp32", "pool_ptr": "*bf16", "witness_ptr": "*u8"}
    certify: dict[str, Any] = {
        "G": 4,
        "D": dim,
        "DV": dim,
        "GV": launch.group_count(dim),
        "PAGE": 16,
        "B": 16,
        "BP": 16,
        "M": 8,
        "N": 32,
        "SPLIT": slack.SPLIT_TOKENS,
        "VALUES": True,
        "STEPS": False,
        "SOFT_CAP": False,
        "WINDOW": False,
        "ALIBI": False,
        "ROWS": False,
        "MULTI": False,
        "FLAG": 0,
        "DOT_ERROR": slack.dot_error(dim),
    }
    extend: dict[str, Any] = {
        "G": 4,
        "D": dim,
        "DV": dim,
        "GV": launch.group_count(dim),
        "PAGE": 16,
        "M": TILE_PAIRS,
        "N": launch.TILE_TOKENS,
        "SOFT_CAP": False,
        "WINDOW": False,
        "SINK": False,
        "ALIBI": False,
        "MIXED": False,
        "BYPASS": 0,
        "BP": 16,
        "P_DTYPE": tl.bfloat16,
    }
    tail: dict[str, Any] = {
        "G": 4,
        "D": dim,
        "DV": dim,
        "GV": launch.group_count(dim),
        "M": launch.TILE_ROWS,
        "N": launch.TILE_TOKENS,
        "SPLIT": slack.SPLIT_TOKENS,
        "SOFT_CAP": False,
        "WINDOW": False,
        "ALIBI": False,
        "METER": True,
        "P_DTYPE": tl.bfloat16,
        "DOT_ERROR": slack.dot_error(dim),
    }
    witness = {"HKV": 8, "D": dim, "DP": dim, "PAGE": 16, "N": 16, "WHOLE": False, "STORE": True}
    size = layout.bytes_per_token_head
    groups = -(-dim // 32)
    return [
        # Reads K and V in 16 bit and a slot and row id a token; writes the packed form and a witness byte a
        # group.
        Case(
            "append",
            append_kernel,
            append,
            bf16_sides,
            warps=4,
            bytes_moved=4 * dim + size + groups,
            floor=size,
        ),
        Case("witness", write_witness_kernel, witness, writer | {"slot_ptr": "*i64"}, warps=4),
        Case("record", write_witness_kernel, witness | {"STORE": False}, writer | {"slot_ptr": "*i64"}, warps=4),
        # K and V in 16 bit, 16 band norms and one value norm.
        Case("certify", certify_split, certify, pool, warps=8, stages=1, bytes_moved=4 * dim + 17, floor=4 * dim),
        Case("extend", extend_attention, extend, chunk, must_not_spill=True),
        Case("extend+repaired", extend_attention, extend | {"MIXED": True}, chunk),
        Case("extend tail", tail_split, tail, chunk, must_not_spill=True),
    ]


def all_cases(dim: int, arch: int) -> list[Case]:
    return decode_cases(dim, arch < 90) + other_cases(dim)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compile decode and extend at D = 128 and fail on spills; write nothing"
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    lines = [
        "# Kernels as compiled, without a GPU",
        "",
        "Written by `bench/static.py`; nothing here is a timing. Bytes per token and KV head are counted",
        "from the kernel's own loads; the floor at D = 128 is 272 (codes and scales of K and V).",
        "",
        "| kernel | D | target | registers | spilled bytes | shared bytes | bytes/token-head | over floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failed = False
    loops = []
    for dim in HEAD_DIMS[-1:] if options.check else HEAD_DIMS:
        by_arch = {arch: all_cases(dim, arch) for arch in TARGETS}
        for index, first in enumerate(by_arch[TARGETS[0]]):
            if options.only not in first.name or (options.check and not first.must_not_spill):
                continue
            for arch in TARGETS:
                case, began = by_arch[arch][index], time.time()
                result = build(case, arch)
                moved = "" if case.bytes_moved is None else str(case.bytes_moved)
                ratio = "" if case.bytes_moved is None or case.floor is None else f"{case.bytes_moved / case.floor:.3f}"
                lines.append(
                    f"| {case.name} | {dim} | sm_{arch} | {result['registers']} | {result['spills']} | "
                    f"{result['shared']} | {moved} | {ratio} |"
                )
                print(lines[-1], f"{time.time() - began:.1f} s", flush=True)
                failed |= case.must_not_spill and result["spills"] > 0
                if case.kernel is decode_split and not options.check:
                    shape = (case.warps, case.constants["N"])
                    loops.append(Loop(case.name, dim, arch, result["cubin"], *shape, case.floor))
    if not options.check and not options.only:
        lines += loop_table(loops)
        (Path(__file__).parent / "static.md").write_text("\n".join(lines) + "\n")
    if failed:
        print("a decode or extend kernel spills", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
