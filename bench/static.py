"""Compile every kernel for sm_80, sm_90 and sm_100 without a GPU and write ``bench/static.md``.

Run without ``TRITON_INTERPRET``: ``python -m bench.static [--check | --options]``. Registers and spills are what ptxas
says of the generated PTX. ``--check`` compiles the decode and extend kernels at D = 128 alone, writes nothing and
fails if one spills; without it the whole table is held to that, at D = 64 too. ``--options`` compiles each kernel with
all its options on, and in the dtypes the table leaves out: nothing may fail. A second table counts the instructions of
the decode kernels' loops (``static_loop.py``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.static_cases import Case, Launch, option_cases, table_cases
from bench.static_loop import Loop, loop_table

TARGETS = (80, 90, 100)
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Built:
    """What ptxas says of a kernel: registers of a thread, spilled bytes; shared memory; and the machine code."""

    registers: int
    spills: int
    shared: int
    cubin: bytes


def build(launch: Launch, arch: int) -> Built:
    """Compile a launch as Triton would at the first call, its arguments specialised alike."""
    kernel, target = launch.kernel, GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(*launch.args, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, given)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "k.ptx"
        ptx.write_text(compiled.asm["ptx"])
        name = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", name, str(ptx), "-o", f"{folder}/k.o"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or spill is None:
        raise RuntimeError(f"ptxas said nothing of registers or spills for {kernel.__name__}: {log}")
    spilled = int(spill.group(1)) + int(spill.group(2))
    return Built(int(used.group(1)), spilled, int(compiled.metadata.shared), compiled.asm["cubin"])


def row_of(case: Case, dim: int, arch: int, built: Built) -> str:
    """The case's line of the table."""
    moved = "" if case.bytes_moved is None else str(case.bytes_moved)
    ratio = "" if case.bytes_moved is None or case.floor is None else f"{case.bytes_moved / case.floor:.3f}"
    return (
        f"| {case.name} | {dim} | sm_{arch} | {built.registers} | {built.spills} | {built.shared} | {moved} | {ratio} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compile decode and extend at D = 128 and fail on spills; write nothing"
    )
    parser.add_argument("--options", action="store_true", help="compile with all options on; write nothing")
    parser.add_argument("--only", default="", help="kernels whose name contains this; write nothing")
    parser.add_argument("--arch", type=int, choices=TARGETS, help="this target alone; write nothing")
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
    for dim in HEAD_DIMS[-1:] if options.check else HEAD_DIMS[:1] if options.options else HEAD_DIMS:
        for case in option_cases(dim) if options.options else table_cases(dim):
            if options.only not in case.name or (options.check and not case.must_not_spill):
                continue
            for arch in TARGETS if options.arch is None else (options.arch,):
                launch, began = case.launch(arch), time.time()
                built = build(launch, arch)
                lines.append(row_of(case, dim, arch, built))
                print(lines[-1], f"{time.time() - began:.1f} s", flush=True)
                failed |= case.must_not_spill and built.spills > 0
                if case.kernel == "decode_split":
                    tokens = launch.options["SHAPE"].N
                    warps = launch.options["num_warps"]
                    loops.append(Loop(case.name, dim, arch, built.cubin, warps, tokens, case.floor))
    table = loop_table(loops)
    if options.check or options.options or options.only or options.arch is not None:
        print("\n".join(table))
    else:
        (Path(__file__).parent / "static.md").write_text("\n".join(lines + table) + "\n")
    if failed:
        print("a decode or extend kernel spills", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
