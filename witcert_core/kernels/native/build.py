"""Compiled code for CPUs: each operation's ``cpu.cpp``, built once for the processor at hand and kept.

What a wheel brought for this processor is loaded; else a C++17 compiler is run on first use (``CXX``, else ``c++``). A
library is put in place by a rename, and who compiles holds a lock that ends with its process, so that a build that was
killed leaves nothing behind that a later one would wait for or load. The libraries have a C interface: neither the
version of PyTorch nor that of Python is in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from witcert_core.errors import UnsupportedError
from witcert_core.kernels.native import toolchain

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}
"""``Dtype`` of ``numbers.h``."""
MAX_DIM = 256
"""Channels of a head that the kernels have room for."""
PATIENCE = 120.0
"""Seconds that a process waits for another one that compiles the same."""


class NotCompiledError(UnsupportedError):
    """Why no compiled kernel can be had."""


def pointers(tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Addresses of those that are there, by name, as ``Arguments`` fields; ``[...]`` of any shape."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def unfit(*channels: int) -> str | None:
    """What is wrong with heads of these sizes, for which the kernels have no room; None where they have."""
    wrong = [n for n in channels if n % 16 or not 16 <= n <= MAX_DIM]
    return f"heads have {wrong[0]} channels; kernels for CPUs take multiples of 16 up to {MAX_DIM}" if wrong else None


def check_channels(*channels: int) -> None:
    """Raise UnsupportedError for heads of a size that the kernels have no room for."""
    if why := unfit(*channels):
        raise UnsupportedError(f"{why}: ask for backend='reference' (slow, float64)")


@functools.cache
def compiled(op: str, arch: str = "native") -> Any:
    """The function of an operation of :mod:`witcert_core.kernels`, which takes the address of its arguments.

    It is compiled where that was not done before, for processors of ``arch`` as the compiler names them.

    Raises:
        NotCompiledError: no compiler, a compiler that fails, or a cache that cannot be written or loaded from.
    """
    (library,) = _libraries([op], arch)
    try:
        function = ctypes.CDLL(str(library)).witcert_run
    except (OSError, AttributeError) as error:
        raise NotCompiledError(
            f"kernels for the CPU are not compiled: {error}; delete {library.parent}, or set XDG_CACHE_HOME"
        ) from error
    function.restype = ctypes.c_int64
    return function


@functools.cache
def not_compiled() -> str | None:
    """Why kernels are not to be had here, in one line; None where all are. What is missing is compiled by this call.

    A process asks once: its answer does not change.
    """
    try:
        _libraries(toolchain.operations(), "native")
        for op in toolchain.operations():
            compiled(op)
    except NotCompiledError as error:
        return str(error)
    return None


def compile_meanwhile() -> None:
    """Compile what is missing in a thread; `not_compiled` waits for it, in this process and in others."""
    if not all(path.exists() for path in _paths(toolchain.operations(), "native").values()):
        threading.Thread(target=not_compiled, name="witcert-compile", daemon=True).start()


def instructions() -> str:
    """Those that kernels are compiled for here, for people."""
    level = toolchain.level()
    return platform.machine() if level is None else level.words


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``witcert`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "witcert"


def _libraries(ops: Sequence[str], arch: str) -> list[Path]:
    """The libraries of some operations, compiled where they are missing."""
    paths = _paths(ops, arch)
    if not all(path.exists() for path in paths.values()):
        flags = toolchain.flags_for(arch)
        try:
            with _alone(cache_folder()):
                missing = {path: (op, flags) for op, path in paths.items() if not path.exists()}
                if len(missing) > 1:
                    print("witcert: compiling kernels for this processor, once", file=sys.stderr, flush=True)
                toolchain.compile_all(missing)
        except toolchain.CompileError as error:
            raise NotCompiledError(f"kernels for the CPU are not compiled: {error}") from error
    return list(paths.values())


def _paths(ops: Sequence[str], arch: str) -> dict[str, Path]:
    """Where the library of each operation is, or will be: in a wheel for this processor, or among those compiled."""
    level = toolchain.level()
    if arch == "native" and level is not None:
        brought = {op: toolchain.BUILT / level.name / f"{op}.so" for op in ops}
        if all(path.exists() for path in brought.values()):
            return brought
    headers = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.h"))]
    # What tells processors apart for which the same code is compiled differently: home folders are shared.
    how = [shlex.join(toolchain.flags_for(arch)), platform.machine(), *sorted(toolchain.features())]

    def key(op: str) -> str:
        texts = [toolchain.source(op).read_bytes(), *headers, *(part.encode() for part in how)]
        return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]

    return {op: cache_folder() / f"{op}-{key(op)}.so" for op in ops}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of processes and threads that compile into a folder one at a time.

    Nobody waits longer than `PATIENCE`, as for a process that was forked with the lock, or on a file system without
    locks: two may then compile the same, and the later rename wins.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise toolchain.CompileError(f"{error}; set XDG_CACHE_HOME") from error
    try:
        last = time.monotonic() + PATIENCE
        while not _locked(handle) and time.monotonic() < last:
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it with a forked process
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
