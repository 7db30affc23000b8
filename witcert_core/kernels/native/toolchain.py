"""How the kernels' C++ is compiled: flags, processors, and the compiler that is run.

Imports nothing of this package: `setup.py` loads this file alone to put compiled kernels into a wheel.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parents[1]
BUILT = Path(__file__).parent / "built"
"""Where a wheel keeps what was compiled for it: a folder for each of `LEVELS`."""
NO_COMPILER = "install g++ or clang++, or name one in CXX"
COMPILE_SECONDS = 600

# Nothing that changes sums or drops NaN: results are bounds.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi", "-fopenmp")


class CompileError(Exception):
    """Why something was not compiled, in one line."""


@dataclass(frozen=True)
class Level:
    """Processors for which kernels are compiled alike.

    name: of a folder. words: for people. needs: features as ``/proc/cpuinfo`` names them. flags: of the compiler.
    """

    name: str
    words: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "sse4_2"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
LEVELS = {
    "x86_64": (
        Level("avx512_vnni", "AVX-512 VNNI", _AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
        Level("avx512", "AVX-512", _AVX512, ("-march=x86-64-v4",)),
        Level("avx2", "AVX2", _AVX2, ("-march=x86-64-v3",)),
        Level("x86_64", "x86-64", frozenset(), ("-march=x86-64",)),
    ),
    "aarch64": (
        Level("dotprod", "NEON with dot products", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
        Level("aarch64", "NEON", frozenset(), ("-march=armv8-a",)),
    ),
}
"""By machine, the best first."""


def operations() -> list[str]:
    """Every operation that has code for CPUs."""
    return sorted(path.parent.name for path in KERNELS.glob("*/cpu.cpp"))


def source(op: str) -> Path:
    """The code of an operation."""
    return KERNELS / op / "cpu.cpp"


def features() -> frozenset[str]:
    """What ``/proc/cpuinfo`` says that this processor can do; nothing where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def level() -> Level | None:
    """The best level that this processor has; None on machines that have none."""
    has = features()
    return next((level for level in LEVELS.get(platform.machine(), ()) if level.needs <= has), None)


def flags_for(arch: str) -> tuple[str, ...]:
    """All flags for processors of ``arch`` as the compiler names them, or "native"."""
    return (*FLAGS, f"-m{'cpu' if platform.machine() == 'aarch64' else 'arch'}={arch}")


def compile_all(built: dict[Path, tuple[str, tuple[str, ...]]]) -> None:
    """Libraries, each of an operation with flags, side by side as there are processors; each appears whole or never.

    Raises:
        CompileError: no compiler, one that fails, or a folder that cannot be written.
    """
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        raise CompileError(f"there is no compiler {' '.join(command)!r}; {NO_COMPILER}")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in [pool.submit(_compile, command, path, *what) for path, what in built.items()]:
            done.result()


def _compile(command: list[str], target: Path, op: str, flags: tuple[str, ...]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            run = [*command, *flags, "-shared", "-fPIC", "-o", str(made), str(source(op))]
            done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
            if done.returncode or not made.exists():
                lines = done.stderr.splitlines() or [f"{command[0]} ended with {done.returncode} and made nothing"]
                raise CompileError(next((line for line in lines if " error: " in line), lines[0]).strip())
            made.replace(target)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took more than {COMPILE_SECONDS} s; {NO_COMPILER}") from error
    except OSError as error:
        raise CompileError(f"{error}; set XDG_CACHE_HOME") from error
