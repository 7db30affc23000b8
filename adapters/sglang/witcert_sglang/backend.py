"""The metered attention backend: SGLang's own class with its two forward methods and its graph methods wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from witcert_sglang.runtime import SglangRuntime


@functools.cache
def metered(base: type[Any]) -> type[Any]:
    """A subclass of the backend class `base` that hands every attention call to the runtime.

    A subclass of the same layout, so that a built backend can change its class and stay an instance of `base`.
    """

    class Metered(base):  # type: ignore[misc]
        witcert_runtime: SglangRuntime

        def forward_decode(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kw: Any
        ) -> Tensor:
            return self.witcert_runtime.attend_layer(
                super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, True, kw, base
            )

        def forward_extend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kw: Any
        ) -> Tensor:
            return self.witcert_runtime.attend_layer(
                super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache, False, kw, base
            )

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kw: Any) -> None:
            """Buffers of our own launches; the stock ones would be of kernels that do not run."""
            self.witcert_runtime.init_graphs(max_bs, max_num_tokens)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.witcert_runtime.eager()
            super().init_forward_metadata(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Before a capture, and before every replay. `forward_batch` is the padded batch, or a view of it."""
            if self.witcert_runtime.graphs is None:
                super().init_forward_metadata_out_graph(forward_batch, in_capture)
            elif in_capture:
                self.witcert_runtime.begin_capture(forward_batch.batch_size)
            else:
                self.witcert_runtime.prepare_replay(forward_batch)

        def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> None:
            """No fused writer: it would store keys the quantizer never saw."""
            return None

    Metered.__name__ = Metered.__qualname__ = f"Metered{base.__name__}"
    return Metered


def metered_factory(
    stock: Callable[[Any], Any], make_runtime: Callable[[Any, Any], SglangRuntime]
) -> Callable[[Any], Any]:
    """A factory for `ATTENTION_BACKENDS` that builds the stock backend and puts the meter around it."""

    def create(runner: Any) -> Any:
        backend = stock(runner)
        runtime = make_runtime(runner, backend)
        backend.__class__ = metered(type(backend))
        backend.witcert_runtime = runtime
        return backend

    create.witcert_stock = stock  # type: ignore[attr-defined]
    return create
