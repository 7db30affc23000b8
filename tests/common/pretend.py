"""Tensors that lie on the CPU and say they are on another device, so that code is held to one device's rules.

On a CPU PyTorch refuses nothing: an index made on the host, a mask of another device pass there and fail on a GPU.
Under `pretending()` a tensor made or copied with `device="meta"` is real and keeps its numbers, and an operation that
mixes it with tensors of the host fails as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from witcert_core.kernels.host import dispatch

DEVICE = torch.device("meta")
_ATEN = torch.ops.aten
CROSSES = {_ATEN._to_copy.default, _ATEN.copy_.default}
"""Operations that move numbers between devices."""
WAITS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.is_nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.repeat_interleave.Tensor,
}
"""Operations whose result, or its size, the host has to wait for."""
HOST_INDEX = {
    _ATEN.index.Tensor: (0,),
    _ATEN.index_put.default: (0, 2),
    _ATEN.index_put_.default: (0, 2),
    _ATEN._index_put_impl_.default: (0, 2),
}
"""Arguments that must share a device where the others are indices, which may be of the host."""


class Pretended(torch.Tensor):
    """`_held` on the CPU, behind a shape on DEVICE."""

    _held: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made._held = real
        return made

    def tolist(self) -> Any:
        if _FORBIDDEN:
            raise RuntimeError("tolist waits for the device")
        return self._held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self._held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    """What PyTorch runs, factories included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Literals(TorchFunctionMode):
    """Tensors and indices of Python numbers, which PyTorch makes without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(given.get("device") or "cpu") == DEVICE:
            return func(*args, **{**given, "device": "cpu"}).to(DEVICE)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _as_tensors(args[1]), *args[2:])
        return func(*args, **given)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat: list[torch.Tensor] = []
    tree_map(lambda x: flat.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
    here = any(isinstance(x, Pretended) for x in flat)
    device = kwargs.get("device")
    if _FORBIDDEN and here and _waits(func, args, device):
        raise RuntimeError(f"{func} waits for the device")
    if func not in CROSSES and here:
        must = HOST_INDEX.get(func)
        held = flat if must is None else [args[i] for i in must if i < len(args) and isinstance(args[i], torch.Tensor)]
        stray = [x for x in held if not isinstance(x, Pretended) and x.dim() > 0]
        if stray or (must is not None and not isinstance(args[0], Pretended)):
            shapes = [tuple(x.shape) for x in stray]
            raise RuntimeError(f"{func}: tensors of the host {shapes} beside tensors of the device")
    if device is not None:
        here = torch.device(device) == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif func is _ATEN.copy_.default:
        here = isinstance(args[0], Pretended)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    original: dict[int, torch.Tensor] = {}

    def unwrap(x: Any) -> Any:
        if isinstance(x, Pretended):
            original[id(x._held)] = x
            return x._held
        return x

    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, Pretended):
            return x
        if id(x) in original:
            return original[id(x)]
        return Pretended(x) if here else x

    return tree_map(wrap, result)


def _waits(func: Any, args: Any, device: Any) -> bool:
    """Whether an operation on tensors of the device holds up the host."""
    if func in HOST_INDEX:  # by flags: how many there are is what the result's size follows from
        return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1])
    to_host = func is _ATEN._to_copy.default and device is not None and torch.device(device) != DEVICE
    return func in WAITS or to_host or (func is _ATEN.copy_.default and not isinstance(args[0], Pretended))


def _as_tensors(index: Any) -> Any:
    """An index with its lists as tensors."""
    if isinstance(index, tuple):
        return tuple(_as_tensors(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _launched(launch: Any, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """A kernel runs on what the device's tensors hold; one of the host has no address there."""
    if not all(isinstance(x, Pretended) for x in tree_leaves(args) if isinstance(x, torch.Tensor)):
        raise RuntimeError(f"{kernel}: tensors of the host are launched with")
    launch(kernel, grid, *tree_map(lambda x: x._held if isinstance(x, Pretended) else x, args), **options)


_FORBIDDEN: list[bool] = []
"""Not empty while nothing may wait for the device."""


@contextmanager
def never_waiting(holds: bool = True) -> Iterator[None]:
    """Within the block nothing may make the host wait for the device; with `holds` false, everything may again."""
    before = list(_FORBIDDEN)
    _FORBIDDEN[:] = [True] if holds else []
    try:
        yield
    finally:
        _FORBIDDEN[:] = before


@contextmanager
def pretending() -> Iterator[None]:
    launch = dispatch.launch
    with (
        torch.no_grad(),
        patch.object(dispatch, "launch", partial(_launched, launch)),
        Operations(),  # type: ignore[no-untyped-call]
        Literals(),
    ):
        yield
