"""Instructions of a compiled kernel's main loop, counted from its machine code; no GPU is touched.

A kernel that reads memory as fast as the card can give it has a limited number of instructions to issue meanwhile: an
SM issues at most four a clock, one from each of its four schedulers, and the special-function unit takes a warp's
instruction every other clock. ``static.py`` prints both beside what the loop over tiles takes.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from triton.backends.nvidia import compiler as nvidia

CLASSES = {
    "tensor": ("HMMA", "IMMA", "QGMMA", "HGMMA", "IGMMA", "UTCHMMA", "DMMA"),
    "special": ("MUFU", "F2F", "F2I", "I2F", "FRND", "F2IP", "I2FP", "POPC", "FLO"),
    "fp32": ("FFMA", "FADD", "FMUL", "FSETP", "FSEL", "FMNMX", "FSET", "FCHK", "FSWZADD", "FFMA2", "FADD2", "FMUL2"),
    "fp16": ("HFMA2", "HADD2", "HMUL2", "HMNMX2", "HSETP2", "HSET2", "F2FP"),
    "memory": ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LD", "ST", "LDGSTS", "LDC", "LDCU", "ATOM", "RED",
               "LDGDEPBAR", "DEPBAR", "UBLKCP"),
}
"""Opcodes of each class; every other opcode is ``integer and moves``, and barriers, shuffles and branches are in ``other``."""
OTHER = ("BAR", "SHFL", "BRA", "BSSY", "BSYNC", "WARPSYNC", "NOP", "EXIT", "REDUX", "VOTE", "VOTEU", "NANOSLEEP", "S2R", "S2UR",
         "CS2R", "BREAK", "WARPGROUP", "MEMBAR", "ERRBAR", "CCTL", "ELECT", "SYNCS", "R2UR", "ENDCOLLECTIVE")
INTEGER = "integer"


def disassemble(cubin: bytes) -> list[str]:
    """Lines of ``nvdisasm``, which Triton ships."""
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@dataclass
class Block:
    """Straight code: opcodes, and the blocks that may follow."""

    opcodes: list[str]
    after: list[int]


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*)")


def blocks_of(lines: list[str]) -> list[Block]:
    """Basic blocks of the listing, in order."""
    blocks, labels, jumps = [Block([], [])], {}, []
    open_end = True
    for line in lines:
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            if blocks[-1].opcodes:
                if open_end:
                    blocks[-1].after.append(len(blocks))
                blocks.append(Block([], []))
            labels[label[1]] = len(blocks) - 1
            open_end = True
            continue
        found = INSTRUCTION.search(line)
        if not found:
            continue
        if not open_end and not blocks[-1].opcodes:
            open_end = True
        guard, opcode, rest = found.groups()
        blocks[-1].opcodes.append(opcode)
        base = opcode.split(".")[0]
        if base in ("BRA", "EXIT", "BRX", "RET", "BREAK"):
            target = re.search(r"\.L_x_\d+", rest)
            if base == "BRA" and target:
                jumps.append((len(blocks) - 1, target[0]))
            open_end = guard is not None or ".DIV" in opcode or bool(re.match(r"\s*!?U?P\d", rest))
            if open_end:
                blocks[-1].after.append(len(blocks))
            blocks.append(Block([], []))
    for source, label in jumps:
        blocks[source].after.append(labels[label])
    return blocks


def main_loop(blocks: list[Block]) -> list[str]:
    """Opcodes of one turn of the longest loop on its shortest way round.

    The shortest way leaves out what a tile in the common case jumps over: the dither of rows that are not shared.
    """
    size = [len(block.opcodes) for block in blocks]
    best: tuple[int, int, int] | None = None
    for latch, block in enumerate(blocks):
        for head in block.after:
            if head <= latch and (best is None or sum(size[head : latch + 1]) > best[0]):
                best = (sum(size[head : latch + 1]), head, latch)
    if best is None:
        raise RuntimeError("the listing has no loop")
    _, head, latch = best
    distance, came = {head: size[head]}, {head: head}
    queue = [(size[head], head)]
    while queue:
        so_far, at = heapq.heappop(queue)
        if at == latch:
            break
        for step in blocks[at].after:
            if head <= step <= latch and so_far + size[step] < distance.get(step, 1 << 30):
                distance[step], came[step] = so_far + size[step], at
                heapq.heappush(queue, (distance[step], step))
    way, at = [latch], latch
    while at != head:
        at = came[at]
        way.append(at)
    return [opcode for block in reversed(way) for opcode in blocks[block].opcodes]


def class_of(opcode: str) -> str:
    base = opcode.split(".")[0]
    for name, members in CLASSES.items():
        if base in members:
            return name
    return "other" if base in OTHER else INTEGER


def loop_counts(cubin: bytes) -> tuple[Counter[str], Counter[str]]:
    """Instructions a warp issues in one turn of the main loop: by class, and by opcode."""
    opcodes = main_loop(blocks_of(disassemble(cubin)))
    return Counter(map(class_of, opcodes)), Counter(opcode.split(".")[0] for opcode in opcodes)
