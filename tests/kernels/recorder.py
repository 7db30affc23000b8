"""A CUDA graph for tests on the CPU: operations and launches recorded once, executed again on the same tensors.

As on a device, Python runs at capture only, everything keeps its address, and host values at capture are frozen. What a
capture forbids is refused: reading a number from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from witcert_core.kernels.host import dispatch

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::unique_dim")


class Launch:
    """A kernel's launch as an operation of that kernel's name."""

    def __init__(self, run: Callable[..., None], kernel: Any) -> None:
        self.run = run
        self.kernel = kernel

    def name(self) -> str:
        return str(self.kernel.__name__)

    def __call__(self, *args: Any, **options: Any) -> None:
        self.run(self.kernel, *args, **options)


class Recorder(TorchDispatchMode):
    """Records every operation and every launch of a kernel that runs while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.launch = dispatch.launch

    def __enter__(self) -> Recorder:
        dispatch.launch = self._record
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        dispatch.launch = self.launch
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _record(self, kernel: Any, *args: Any, **options: Any) -> None:
        launch = Launch(self.launch, kernel)
        with _disable_current_modes():  # what the interpreter does on the way is no operation of the graph
            launch(*args, **options)
        self.ops.append((launch, args, options, None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().split(".")[0] in WAITS:
            raise RuntimeError(f"{func} waits for the device, which a capture forbids")
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self, keep: Callable[[Any], bool] = lambda _func: True) -> None:
        """Run the operations again, those that `keep` refuses left out."""
        for func, args, kwargs, out in self.ops:
            if not keep(func):
                continue
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # views and in-place results agree
                    old.copy_(new)


class RecordedBackend:
    """SGLang's `FullCudaGraphBackend` with recordings for graphs; `leave_out`: what the next replays skip."""

    def __init__(self, _runner: Any) -> None:
        self.graphs: dict[Any, Recorder] = {}
        self.outputs: dict[Any, Any] = {}
        self.replayed: list[int] = []
        self.leave_out: Callable[[Any], bool] = lambda _func: False

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """One warm-up (SGLang runs two alike), then the capture, as SGLang does it."""
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        graph = Recorder()
        with graph:
            self.outputs[shape_key] = forward_fn()
        self.graphs[shape_key] = graph

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        self.replayed.append(shape_key.size)
        self.graphs[shape_key].replay(lambda func: not self.leave_out(func))
        return self.outputs[shape_key]

    def cleanup(self) -> None:
        self.graphs.clear()
