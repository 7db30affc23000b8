"""Which implementation runs, a plain error where none can, and the one place where kernels are launched.

``triton`` needs a GPU, or a CPU with ``TRITON_INTERPRET=1`` (tests). ``cpu`` is compiled on first use and needs a
C++ compiler. ``reference`` is torch in float64 and runs anywhere. ``auto`` takes the one that its tensors' device has
and refuses where that cannot run: a slow path is only taken when asked for. A server asks first
(`without_kernels`), and says what it found.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from witcert_core.errors import UnsupportedError
from witcert_core.kernels.native import build
from witcert_core.meter.kernel_error import KernelArithmetic

BACKENDS = ("auto", "triton", "cpu", "reference")


def interpreting() -> bool:
    """True when Triton kernels are interpreted on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def without_kernels(device: str, *channels: int) -> str | None:
    """Why heads of `channels` that lie on `device` are left to plain torch; None where kernels take them.

    On a CPU the kernels are compiled by this call, where nobody did that before.
    """
    if device != "cpu" or interpreting():
        return None
    return build.unfit(*channels) or build.not_compiled()


def prepare_kernels(device: str) -> None:
    """Begin to compile what `device` will need, while an engine starts."""
    if device == "cpu" and not interpreting():
        build.compile_meanwhile()


def serving_kernels(device: str) -> str:
    """What the kernels on `device` are, in a few words for people."""
    if interpreting():
        return "Triton, interpreted"
    return "Triton" if device != "cpu" else f"compiled for this processor ({build.instructions()})"


def resolve(backend: str, device: torch.device) -> str:
    """``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        UnsupportedError: an unknown name, Triton not installed, or a device that it cannot run on.
    """
    if backend not in BACKENDS:
        raise UnsupportedError(f"backend is {backend!r}; allowed are {', '.join(BACKENDS)}")
    on_cpu = device.type == "cpu"
    if backend == "auto":
        backend = "cpu" if on_cpu and not interpreting() else "triton"
    if backend == "reference":
        return backend
    if backend == "cpu":
        if not on_cpu:
            raise UnsupportedError(
                f"backend is 'cpu', but tensors are on {device.type!r}; allowed there are auto and triton"
            )
        return backend
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "Triton is not installed; install witcert[triton], or ask for backend='reference' (slow, float64)"
        )
    if device.type != "cuda" and not interpreting():
        raise UnsupportedError(
            f"tensors are on {device.type!r}, where Triton cannot run; move them to a GPU, or ask for backend='cpu' or "
            "'reference' (slow, float64)"
        )
    return "triton"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel over a grid, which is left out where it is empty: nothing is read back on the host."""
    if all(grid):
        kernel[grid](*arguments, **options)


def check_compute_dtype(dtype: torch.dtype, backend: str) -> None:
    """Refuse dtypes the kernels cannot compute with; bf16 dots are wrong under Triton's interpreter."""
    whole = backend == "cpu" or not interpreting()
    allowed = (torch.float32, torch.float16, torch.bfloat16) if whole else (torch.float32, torch.float16)
    if dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise UnsupportedError(f"queries have dtype {dtype}; allowed here are {names}")


def weights_are_cast(dtype: torch.dtype) -> bool:
    """Whether attention weights meet V in bfloat16: 16-bit queries on a GPU. The interpreter keeps fp32."""
    return dtype != torch.float32 and not interpreting()


def own_arithmetic(dtype: torch.dtype, device: torch.device) -> KernelArithmetic:
    """What these kernels do with weights and outputs for queries of a dtype: exact float16 values meet float16.

    Those compiled for CPUs multiply float32 weights with float32 values, whatever the dtype of the queries.
    """
    if device.type == "cpu" or not weights_are_cast(dtype):
        return KernelArithmetic((), dtype)
    exact = (torch.float16,) if dtype == torch.float16 else ()
    return KernelArithmetic((torch.bfloat16, *exact), dtype)
