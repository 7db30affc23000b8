"""Compiled code for CPUs: each operation's ``cpu.cpp``, built once for the processor at hand and kept.

A C++17 compiler is run on first use (``CXX``, else ``c++``); the library is put in place by a rename, so that a build
that was killed leaves nothing behind that a later one would wait for or load. The libraries have a C interface: neither
the version of PyTorch nor that of Python is in them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
"""``Dtype`` of ``numbers.h``."""
MAX_DIM = 256
"""Channels of a head that the kernels have room for."""

# Nothing that changes sums or drops NaN: results are bounds.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi", "-fopenmp")
_HERE = Path(__file__).parent


class NotCompiledError(UnsupportedError):
    """Why no compiled kernel can be had."""


def pointers(tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Addresses of those that are there, by name, as ``Arguments`` fields; ``[...]`` of any shape."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def check_channels(*channels: int) -> None:
    """Raise UnsupportedError for heads of a size that the kernels have no room for."""
    wrong = [n for n in channels if n % 16 or not 16 <= n <= MAX_DIM]
    if wrong:
        raise UnsupportedError(
            f"heads have {wrong[0]} channels; kernels for CPUs take multiples of 16 up to {MAX_DIM}: ask for "
            "backend='reference' (slow, float64)"
        )


@functools.cache
def compiled(op: str, arch: str = "native") -> Any:
    """The function of an operation of :mod:`witcert_core.kernels`, which takes the address of its arguments.

    It is compiled where that was not done before, for processors of ``arch`` as the compiler names them.

    Raises:
        NotCompiledError: no compiler, a compiler that fails, or a cache that cannot be written.
    """
    source = _HERE.parent / op / "cpu.cpp"
    flags = (*_FLAGS, f"-m{'cpu' if platform.machine() == 'aarch64' else 'arch'}={arch}")
    texts = [path.read_bytes() for path in (source, *sorted(_HERE.glob("*.h")))]
    key = hashlib.sha256(b"\0".join([*texts, shlex.join(flags).encode(), _processor().encode()])).hexdigest()[:16]
    target = cache_folder() / f"{op}-{key}.so"
    if not target.exists():
        _build(source, target, flags)
    function = ctypes.CDLL(str(target)).witcert_run
    function.restype = ctypes.c_int64
    return function


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``witcert`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "witcert"


def _build(source: Path, target: Path, flags: tuple[str, ...]) -> None:
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise NotCompiledError(
            f"kernels for the CPU are not compiled: there is no compiler {command[0]!r}; install g++ or "
            "clang++, or name one in CXX"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            run = [*command, *flags, "-shared", "-fPIC", "-o", str(built), str(source)]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.splitlines() or [f"{command[0]} ended with {done.returncode}"]
                cause = next((line for line in lines if " error: " in line), lines[0])
                raise NotCompiledError(f"kernels for the CPU are not compiled: {cause.strip()}")
            built.replace(target)
    except OSError as error:
        raise NotCompiledError(f"kernels for the CPU are not compiled: {error}; set XDG_CACHE_HOME") from error


@functools.cache
def _processor() -> str:
    """What tells processors apart for which the same code is compiled differently: home folders are shared."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    features = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}"
