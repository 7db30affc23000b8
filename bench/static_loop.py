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
    "memory": (
        *("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "LD", "ST", "LDC", "LDCU", "ULDC"),
        *("LDGSTS", "LDGDEPBAR", "DEPBAR", "UBLKCP", "ATOM", "RED"),
    ),
    "control": ("BAR", "SHFL", "BRA", "BSSY", "BSYNC", "WARPSYNC", "REDUX", "VOTE", "VOTEU", "CALL", "NOP", "EXIT"),
}
"""Opcodes of each class; every other one is of :data:`INTEGER`: addresses, comparisons, bits, moves."""
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
            # Guarded by a predicate, before the opcode or as its first operand, the code after it is reached too.
            open_end = guard is not None or ".DIV" in opcode or bool(re.match(r"\s*!?U?P\d", rest))
            if open_end:
                blocks[-1].after.append(len(blocks))
            blocks.append(Block([], []))
    for source, target_label in jumps:
        blocks[source].after.append(labels[target_label])
    return blocks


def main_loop(blocks: list[Block]) -> list[str]:
    """Opcodes of one turn of the longest loop on its shortest way round.

    The shortest way leaves out what a tile in the common case jumps over: the dither of tokens of other passes.
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
    return INTEGER


def loop_counts(cubin: bytes) -> tuple[Counter[str], Counter[str]]:
    """Instructions a warp issues in one turn of the main loop: by class, and by opcode."""
    opcodes = main_loop(blocks_of(disassemble(cubin)))
    return Counter(map(class_of, opcodes)), Counter(opcode.split(".")[0] for opcode in opcodes)


@dataclass(frozen=True)
class Card:
    """A GPU: memory in bytes a second, SMs, and clock in Hz.

    From NVIDIA's data sheets (A100 80GB SXM 2021, H100 SXM 2023, H200 SXM 2024, HGX B200 2025); the clock is the one
    that their FP32 peak implies: peak / (2 * lanes of an SM * SMs).
    """

    name: str
    arch: int
    bandwidth: float
    sms: int
    clock: float


CARDS = (
    Card("A100", 80, 2.039e12, 108, 1.41e9),
    Card("H100", 90, 3.35e12, 132, 1.98e9),
    Card("H200", 90, 4.8e12, 132, 1.98e9),
    Card("B200", 100, 8.0e12, 148, 1.98e9),
)
SLOTS = 4
"""Warp instructions that an SM issues in a clock."""
SPECIAL = 0.5
"""Of these, such as the special-function unit and conversions take: 16 lanes of the SM's 128."""
UNIT = 32
"""Tokens that the table counts for."""


@dataclass(frozen=True)
class Loop:
    """One compiled decode kernel; ``nbytes`` a token and KV head that it cannot do without."""

    name: str
    dim: int
    arch: int
    cubin: bytes
    warps: int
    tokens: int
    nbytes: int | None


def loop_table(loops: list[Loop]) -> list[str]:
    """Markdown lines: instructions for 32 tokens of a KV head, and what share of the memory's time they take."""
    names = [*CLASSES, INTEGER]
    lines = [
        "",
        "## Instructions of the loop against the memory's time",
        "",
        "Warp instructions that the decode loop issues for 32 tokens of one KV head, counted in the machine code on",
        "the way of tiles whose tokens are of one pass; and the share they take, at the least,",
        "of the time that the card's memory needs for these tokens' codes and scales: four instructions a clock and",
        "SM, or one special one (conversions counted among them) every other clock, whichever is more. Above 100 %",
        "the loop is bound by instructions; real kernels stay below four a clock. `bench/static_loop.py` has the",
        "cards' numbers.",
        "",
        "| kernel | D | target | " + " | ".join(names) + " | all | share of the memory's time |",
        "|---" * (len(names) + 5) + "|",
    ]
    for loop in loops:
        counts, _ = loop_counts(loop.cubin)
        each = {name: counts[name] * loop.warps * UNIT // loop.tokens for name in names}
        total = sum(each.values())
        shares = []
        for card in CARDS:
            if card.arch == loop.arch and loop.nbytes is not None:
                clocks = UNIT * loop.nbytes / (card.bandwidth / card.sms / card.clock)
                share = max(total / SLOTS, each["special"] / SPECIAL) / clocks
                shares.append(f"{card.name} {100 * share:.0f} %")
        cells = " | ".join(str(each[name]) for name in names)
        lines.append(f"| {loop.name} | {loop.dim} | sm_{loop.arch} | {cells} | {total} | {', '.join(shares)} |")
    return lines
